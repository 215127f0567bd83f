// Writes gpu.yaml and gpu.json, the test data of src/cdi/tests.rs, into a directory with the Go library of CDI. In a copy of this file:
//
//	go mod init generate && go get tags.cncf.io/container-device-interface@v1.1.2 && go mod tidy && go run . DIRECTORY
package main

import (
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func ptr[T any](value T) *T { return &value }

func main() {
	edits := specs.ContainerEdits{
		Env: []string{"GPU_MODE=a=b", "GPU_NOTE=yes: \"quoted\" # and more", "GPU_EMPTY="},
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/gpuctl", HostPath: "/dev/zero", Permissions: "rw", FileMode: ptr(os.FileMode(0o640)), UID: ptr(uint32(1000)), GID: ptr(uint32(44))},
			{Path: "/dev/gpu-caps", Type: "c", Major: 1, Minor: 5, Permissions: "none"},
			{Path: "/dev/gpu-events", Type: "p"},
		},
		Mounts:         []*specs.Mount{{HostPath: "/usr/lib/libgpu.so.1", ContainerPath: "/usr/lib/libgpu.so.1", Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}, Type: "bind"}},
		AdditionalGIDs: []uint32{0, 44},
	}
	hooks := specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/usr/bin/gpu-hook", Args: []string{"gpu-hook", "update-ldcache", "--folder", "/usr/lib"}, Env: []string{"DEBUG=1"}, Timeout: ptr(10)}}}
	spec := &specs.Spec{
		Version:        "1.1.0",
		Kind:           "vendor.com/gpu",
		Annotations:    map[string]string{"vendor.com/driver": "1.5", "empty": ""},
		ContainerEdits: edits,
		Devices: []specs.Device{
			{Name: "0", Annotations: map[string]string{"vendor.com/uuid": "123"}, ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/gpu0", HostPath: "/dev/null"}}}},
			{Name: "all", ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/gpu0", HostPath: "/dev/null"}, {Path: "/dev/gpu1", HostPath: "/dev/full"}}}},
			{Name: "hooked", ContainerEdits: hooks},
			{Name: "cache", ContainerEdits: specs.ContainerEdits{IntelRdt: &specs.IntelRdt{ClosID: "gpu", L3CacheSchema: "L3:0=f", Schemata: []string{"MB:0=50"}, EnableMonitoring: true}}},
			{Name: "nic", ContainerEdits: specs.ContainerEdits{NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: "eth7", Name: "gpu0"}}}},
			{Name: "memory", ContainerEdits: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "tmpfs", ContainerPath: "/gpu", Type: "tmpfs", Options: []string{"size=1m"}}}}},
		},
	}
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(os.Args[1]))
	for _, name := range []string{"gpu.yaml", "gpu.json"} {
		if err == nil {
			err = cache.WriteSpec(spec, name)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
