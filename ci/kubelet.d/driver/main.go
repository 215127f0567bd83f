// A driver of the Container Storage Interface as nodes have them, for the case that has one: it mounts a file system of a block
// device for kubelet once and binds it into each pod's folder, gives out the device itself where a claim asks for that, tells
// what is used, and grows what has grown. Devices are the node's own: nobody makes them.
//
//	driver NAME VOLUME=DEVICE...
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Where kubelet looks for plugins, and where it has its own folder of each.
const (
	registry = "/var/lib/kubelet/plugins_registry"
	plugins  = "/var/lib/kubelet/plugins"
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	name     string
	endpoint string
	devices  map[string]string
}

// What kubelet's plugin watcher asks; another type because its interface has methods of a name of its own.
type registrar struct {
	registration.UnimplementedRegistrationServer
	of *driver
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: driver NAME VOLUME=DEVICE...")
	}
	of := &driver{name: os.Args[1], devices: map[string]string{}}
	for _, pair := range os.Args[2:] {
		volume, device, found := strings.Cut(pair, "=")
		if !found {
			log.Fatalf("%q is not VOLUME=DEVICE", pair)
		}
		of.devices[volume] = device
	}
	of.endpoint = filepath.Join(plugins, of.name, "csi.sock")
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, of)
	csi.RegisterNodeServer(server, of)
	go serve(server, of.endpoint)
	registrars := grpc.NewServer()
	registration.RegisterRegistrationServer(registrars, registrar{of: of})
	serve(registrars, filepath.Join(registry, of.name+"-reg.sock"))
}

func serve(server *grpc.Server, socket string) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		log.Fatal(err)
	}
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(server.Serve(listener))
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: "CSIPlugin", Name: r.of.name, Endpoint: r.of.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (r registrar) NotifyRegistrationStatus(
	_ context.Context, said *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !said.PluginRegistered {
		log.Printf("kubelet does not take %s: %s", r.of.name, said.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "node"}, nil
}

func (d *driver) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	answer := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
	} {
		rpc := &csi.NodeServiceCapability_RPC{Type: kind}
		answer.Capabilities = append(answer.Capabilities,
			&csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: rpc}})
	}
	return answer, nil
}

func (d *driver) device(volume string) (string, error) {
	device, found := d.devices[volume]
	if !found {
		return "", status.Errorf(codes.NotFound, "no volume %q", volume)
	}
	return device, nil
}

// NodeStageVolume mounts the file system once for all pods of the node.
func (d *driver) NodeStageVolume(
	_ context.Context, request *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	device, err := d.device(request.VolumeId)
	if err != nil {
		return nil, err
	}
	if request.VolumeCapability.GetBlock() == nil {
		if err := mount(device, request.StagingTargetPath, "ext4", 0); err != nil {
			return nil, err
		}
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// NodeUnstageVolume is called when the last pod is gone.
func (d *driver) NodeUnstageVolume(
	_ context.Context, request *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, unmount(request.StagingTargetPath)
}

// NodePublishVolume gives it to a pod: the folder, or the device's node.
func (d *driver) NodePublishVolume(
	_ context.Context, request *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	source := request.StagingTargetPath
	if request.VolumeCapability.GetBlock() != nil {
		device, err := d.device(request.VolumeId)
		if err != nil {
			return nil, err
		}
		source = device
		if err := os.MkdirAll(filepath.Dir(request.TargetPath), 0o750); err != nil {
			return nil, failed("make the folder", err)
		}
		file, err := os.OpenFile(request.TargetPath, os.O_CREATE, 0o600)
		if err != nil {
			return nil, failed("make the file to bind to", err)
		}
		file.Close()
	} else if err := os.MkdirAll(request.TargetPath, 0o750); err != nil {
		return nil, failed("make the folder", err)
	}
	if err := mount(source, request.TargetPath, "", unix.MS_BIND); err != nil {
		return nil, err
	}
	if request.Readonly {
		flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY)
		if err := unix.Mount("", request.TargetPath, "", flags, ""); err != nil {
			return nil, failed("make it read-only", err)
		}
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume takes it from a pod, with what it was bound to.
func (d *driver) NodeUnpublishVolume(
	_ context.Context, request *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := unmount(request.TargetPath); err != nil {
		return nil, err
	}
	if err := os.Remove(request.TargetPath); err != nil && !os.IsNotExist(err) {
		return nil, failed("remove what it was bound to", err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodeGetVolumeStats tells what is used of a file system; of a device only its size.
func (d *driver) NodeGetVolumeStats(
	_ context.Context, request *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	var all unix.Statfs_t
	if err := unix.Statfs(request.VolumePath, &all); err != nil {
		return nil, failed("look at the file system", err)
	}
	size := all.Bsize
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{
		Unit:  csi.VolumeUsage_BYTES,
		Total: int64(all.Blocks) * size, Available: int64(all.Bavail) * size, Used: int64(all.Blocks-all.Bfree) * size,
	}, {
		Unit:  csi.VolumeUsage_INODES,
		Total: int64(all.Files), Available: int64(all.Ffree), Used: int64(all.Files - all.Ffree),
	}}}, nil
}

// NodeExpandVolume lets the file system grow into its device.
func (d *driver) NodeExpandVolume(
	_ context.Context, request *csi.NodeExpandVolumeRequest,
) (*csi.NodeExpandVolumeResponse, error) {
	device, err := d.device(request.VolumeId)
	if err != nil {
		return nil, err
	}
	if request.VolumeCapability.GetBlock() == nil {
		if said, err := exec.Command("resize2fs", device).CombinedOutput(); err != nil {
			return nil, failed("grow the file system", fmt.Errorf("%w: %s", err, said))
		}
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: request.CapacityRange.GetRequiredBytes()}, nil
}

// Mounts what is not mounted there yet: each call may come twice.
func mount(source, target, kind string, flags uintptr) error {
	mounted, err := isMounted(target)
	if err != nil || mounted {
		return err
	}
	if err := unix.Mount(source, target, kind, flags, ""); err != nil {
		return failed("mount "+source+" on "+target, err)
	}
	return nil
}

func unmount(target string) error {
	mounted, err := isMounted(target)
	if err != nil || !mounted {
		return err
	}
	if err := unix.Unmount(target, 0); err != nil {
		return failed("unmount "+target, err)
	}
	return nil
}

func isMounted(target string) (bool, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return false, failed("read what is mounted", err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if fields := strings.Fields(line); len(fields) > 1 && fields[1] == target {
			return true, nil
		}
	}
	return false, nil
}

func failed(what string, err error) error {
	return status.Errorf(codes.Internal, "cannot %s: %v", what, err)
}
