# The AppArmor profile of containers of engine `host` that request no other (RuntimeDefault). It adds a second fence behind namespaces,
# capabilities and read-only paths: no mounts, no writes to settings of the node's kernel, no signals and no tracing across its border.
profile nacelle-default flags=(attach_disconnected, mediate_deleted) {
    capability,
    file,
    network,
    umount,

    # Only the node and other containers of this profile signal and trace.
    signal (receive) peer=unconfined,
    signal (send, receive) peer=nacelle-default,
    ptrace (readby, tracedby) peer=unconfined,
    ptrace (read, readby, trace, tracedby) peer=nacelle-default,

    deny mount,
    deny remount,
    deny pivot_root,

    # Settings of the kernel, except those of the pod's own network and IPC namespaces and its host name.
    deny /proc/sys/{abi,debug,dev,sunrpc,user,vm}/** w,
    deny /proc/sys/fs/{[^m]*,mo*}{,/**} w,
    deny /proc/sys/kernel/[^dhms]*{,/**} w,
    deny /proc/sys/kernel/{dm*,ha*,hot*,hu*,ma*,mo*,sc*,se[^m]*,sg*,so*,sp*,st*,sy*}{,/**} w,
    deny /proc/{acpi,asound,bus,driver,fs,irq,scsi,tty}/** w,
    deny /proc/{kcore,kmem,mem} rwkl,
    deny /proc/{sysrq-trigger,timer_list,sched_debug,latency_stats,kpagecount,kpageflags} w,
    deny /sys/{block,bus,class,dev,devices,firmware,hypervisor,kernel,module,power}/** wl,
    deny /sys/kernel/security/** rwkl,
}
