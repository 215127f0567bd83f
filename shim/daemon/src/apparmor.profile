# The AppArmor profile of containers of engine `host` that request no other (RuntimeDefault): a second layer behind namespaces,
# capabilities and read-only paths. It denies mounts, writes to settings of the node's kernel, and signals to and tracing of processes
# with other profiles.
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

    # Settings of the kernel, except those of the network and IPC namespaces and of the host name, which are the pod's (the node's for pods
    # with the node's namespaces).
    deny /proc/sys/{abi,debug,dev,sunrpc,user,vm}/** w,
    deny /proc/sys/fs/{[^m]*,mo*}{,/**} w,
    deny /proc/sys/kernel/[^dhms]*{,/**} w,
    deny /proc/sys/kernel/{dm*,ha*,hot*,hu*,hy*,ma*,mo*,sc*,se[^m]*,sg*,so*,sp*,st*,sy*}{,/**} w,
    deny /proc/{acpi,asound,bus,driver,fs,irq,scsi,tty}/** w,
    deny /proc/{kcore,kmem,mem} rwkl,
    deny /proc/{mtrr,sysrq-trigger,timer_list,sched_debug,latency_stats,kpagecount,kpageflags} w,
    deny /sys/{block,bus,class,dev,devices,firmware,hypervisor,kernel,module,power}/** wl,
    deny /sys/fs/{[^c]*,c[^g]*,cg[^r]*}{,/**} wl,
    deny /sys/{firmware,kernel/security,devices/virtual/powercap}/** rwkl,
}
