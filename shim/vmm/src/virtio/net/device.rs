//! Implements [`Device`] for the network device, and the control queue. It may be called on any thread. One lock protects the
//! pairs, another the configuration space; a thread that serves a pair takes only the second, so the first may be held while
//! waiting for such a thread. No code waits for the control queue's thread under a lock.

use super::control::{CommandLimits, ControlCommand, MAX_COMMAND};
use super::filter::{MacAddress, ReceiveFilter};
use super::pair::QueuePair;
use super::tap::Tap;
use super::{MAX_PAIRS, NetError, NetMetrics, NetState, feature};
use crate::virtio::queue_thread::{self, QueueThread};
use crate::virtio::ring::Request;
use crate::virtio::{
    COMMON_FEATURES, Device, DeviceKind, DeviceState, Interrupt, Memory, Ring, StartError, StateError, read_config,
};
use nacelle_base::{guest_error, guest_warn};
use nacelle_jail::ThreadKind;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use virtio_queue::QueueState;

/// The size of each transmit queue and of the control queue.
const QUEUE_SIZE: u16 = 256;

/// The size of each receive queue. A frame of 64 KiB takes 17 of the guest's buffers. If too few are left for the next frame,
/// vhost-net polls them repeatedly instead of waiting for more (handle_rx in drivers/vhost/net.c). With 30 frames' worth that
/// is rare; with 15 it cost a fifth of the throughput.
const RECEIVE_QUEUE_SIZE: u16 = 512;

/// `VIRTIO_NET_S_LINK_UP`.
const LINK_UP: u16 = 1;

/// The configuration and resources of a network device.
#[derive(Debug)]
pub struct NetConfig {
    /// Open queues of one tap with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, 1 to [`MAX_PAIRS`]; several also need
    /// `IFF_MULTI_QUEUE`. Each serves one pair of queues.
    pub taps: Vec<OwnedFd>,
    /// The initial address of the guest's interface.
    pub mac: [u8; 6],
    /// The maximum MTU that the guest may set, in bytes: 68 or more.
    pub mtu: u16,
    /// Open files of vhost-net ([`open_vhost`](super::open_vhost)), as many as taps, or none: then threads of this process
    /// serve the queues.
    pub vhost: Vec<OwnedFd>,
}

/// The network device.
#[derive(Debug)]
pub struct Net {
    inner: Arc<NetInner>,
    /// The maximum size of each queue.
    sizes: Vec<u16>,
    features: u64,
    /// The initial address.
    mac: [u8; 6],
    control: Option<QueueThread>,
}

#[derive(Debug)]
struct NetInner {
    metrics: Arc<NetMetrics>,
    config_space: Mutex<ConfigSpace>,
    queue_pairs: Mutex<QueuePairs>,
}

/// The content of the configuration space.
struct ConfigSpace {
    mac: [u8; 6],
    up: bool,
    max_pairs: u16,
    mtu: u16,
    interrupt: Option<Arc<dyn Interrupt>>,
}

/// The pairs, and the negotiated state.
#[derive(Debug)]
struct QueuePairs {
    pairs: Vec<QueuePair>,
    features: u64,
    active: u16,
    offloads: u64,
    /// The offloads that the driver had set before the save. They replace the negotiated ones.
    restored: Option<u64>,
    filter: ReceiveFilter,
}

/// A queue, identified from its number.
enum QueueRole {
    Control,
    Data { pair: usize, side: usize },
}

impl Net {
    /// Creates the device. The taps are made non-blocking, and their frame header is set to 12 bytes.
    pub fn new(config: NetConfig) -> Result<Net, NetError> {
        let NetConfig { taps, mac, mtu, vhost } = config;
        let count = u16::try_from(taps.len()).ok().filter(|count| (1..=MAX_PAIRS).contains(count));
        let max_pairs = count.ok_or(NetError::Taps { got: taps.len() })?;
        if !vhost.is_empty() && vhost.len() != taps.len() {
            return Err(NetError::Vhosts { got: vhost.len(), taps: taps.len() });
        }
        let mut vhosts = vhost.into_iter();
        let mut pairs = Vec::with_capacity(taps.len());
        for tap in taps {
            pairs.push(QueuePair::new(Tap::new(tap, max_pairs > 1)?, vhosts.next()));
        }
        let mut features = offered_features(max_pairs, pairs.iter().all(|pair| pair.tap().has_uso()));
        for pair in &pairs {
            if let Some(vhost) = pair.vhost() {
                features = vhost.features(features)?;
            }
        }
        let mut queue_pairs = QueuePairs {
            pairs,
            features: 0,
            active: max_pairs,
            offloads: 0,
            restored: None,
            filter: ReceiveFilter::default(),
        };
        let begin = |source| NetError::System { what: "prepare a tap", source };
        queue_pairs.set_active(1).map_err(begin)?;
        queue_pairs.set_offloads(0).map_err(begin)?;
        queue_pairs.apply_filter(mac).map_err(begin)?;
        let config_space = Mutex::new(ConfigSpace { mac, up: true, max_pairs, mtu, interrupt: None });
        let inner = NetInner { metrics: Arc::default(), config_space, queue_pairs: Mutex::new(queue_pairs) };
        let mut sizes = [RECEIVE_QUEUE_SIZE, QUEUE_SIZE].repeat(max_pairs.into());
        sizes.push(QUEUE_SIZE);
        Ok(Net { inner: Arc::new(inner), sizes, features, mac, control: None })
    }

    /// Returns the counters, which remain readable after the device has been passed to a transport.
    pub fn metrics(&self) -> Arc<NetMetrics> {
        self.inner.metrics.clone()
    }

    /// Returns the device for a transport.
    pub fn device(self) -> Box<dyn Device> {
        Box::new(self)
    }

    /// Returns the queue with this number. The control queue follows the pairs that the driver has negotiated (Virtio 1.2, 5.1.2).
    fn queue_role(&self, index: u16) -> Option<QueueRole> {
        let multi = self.inner.queue_pairs().features & feature::MQ != 0;
        let control = if multi { self.sizes.len() - 1 } else { 2 };
        let index = usize::from(index);
        match index {
            _ if index == control => Some(QueueRole::Control),
            _ if index < control => Some(QueueRole::Data { pair: index / 2, side: index % 2 }),
            _ => None,
        }
    }
}

/// Returns the features that a device with `max_pairs` pairs offers. UDP fragmentation is not included, because Linux no longer
/// supports it.
fn offered_features(max_pairs: u16, uso: bool) -> u64 {
    use feature::*;
    let uso = if uso { GUEST_USO | HOST_USO } else { 0 };
    let several = if max_pairs > 1 { MQ } else { 0 };
    let frames = CSUM | HOST_TSO4 | HOST_TSO6 | HOST_ECN | MRG_RXBUF;
    let guest = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | CTRL_GUEST_OFFLOADS;
    COMMON_FEATURES | frames | guest | uso | MAC | MTU | STATUS | CTRL_VQ | CTRL_RX | CTRL_MAC_ADDR | several
}

impl NetInner {
    fn queue_pairs(&self) -> MutexGuard<'_, QueuePairs> {
        self.queue_pairs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn config_space(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config_space.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Reports to the guest that the link is down, because the interface no longer exists.
    fn report_link_down(&self) {
        let mut config_space = self.config_space();
        config_space.up = false;
        let interrupt = config_space.interrupt.clone();
        drop(config_space);
        if let Some(interrupt) = interrupt {
            interrupt.notify_config();
        }
    }

    /// Executes a command. Returns the number of bytes written to the guest.
    fn serve_command(&self, memory: &Memory, mut request: Request) -> u32 {
        self.metrics.commands.fetch_add(1, Ordering::Relaxed);
        let Some(status) = request.buffers.writable.split_front(1) else {
            self.metrics.bad_commands.fetch_add(1, Ordering::Relaxed);
            return 0;
        };
        let done = self.execute_command(memory, &request).is_some();
        if !done {
            guest_warn!("a command of the guest's network driver was rejected");
            self.metrics.bad_commands.fetch_add(1, Ordering::Relaxed);
        }
        let written = status.write(memory, &[u8::from(!done)]).unwrap_or(0); // VIRTIO_NET_OK, VIRTIO_NET_ERR
        u32::try_from(written).unwrap_or(0)
    }

    fn execute_command(&self, memory: &Memory, request: &Request) -> Option<()> {
        let length = request.buffers.readable.len();
        if length > MAX_COMMAND {
            return None;
        }
        let mut bytes = vec![0; length];
        request.buffers.readable.read(memory, &mut bytes).ok()?;
        let mut queue_pairs = self.queue_pairs();
        let limits = queue_pairs.command_limits();
        let done = match ControlCommand::parse(&bytes, limits)? {
            ControlCommand::Filter(change) => {
                queue_pairs.filter.change(change);
                queue_pairs.apply_filter(self.config_space().mac)
            }
            ControlCommand::Mac(mac) => {
                self.config_space().mac = mac;
                queue_pairs.apply_filter(mac)
            }
            ControlCommand::Pairs(count) => queue_pairs.set_active(count),
            ControlCommand::Offloads(bits) => queue_pairs.set_offloads(bits),
        };
        done.inspect_err(|error| guest_error!("cannot change a network interface: {error}")).ok()
    }
}

impl QueuePairs {
    fn command_limits(&self) -> CommandLimits {
        let has = |bits| self.features & bits != 0;
        let pairs = if has(feature::MQ) { u16::try_from(self.pairs.len()).unwrap_or(1) } else { 1 };
        let switched = if has(feature::CTRL_GUEST_OFFLOADS) { feature::GUEST_OFFLOADS } else { 0 };
        CommandLimits { pairs, offloads: self.features & switched, mac: has(feature::CTRL_MAC_ADDR) }
    }

    /// Makes the first `count` pairs active and the others inactive.
    fn set_active(&mut self, count: u16) -> std::io::Result<()> {
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            pair.set_active(index < usize::from(count))?;
        }
        self.active = count;
        Ok(())
    }

    /// Sets the offloads of the tap for frames to the guest.
    fn set_offloads(&mut self, bits: u64) -> std::io::Result<()> {
        // Offloads belong to the interface, not to a queue. The first queue sets them, because it is always attached.
        if let Some(first) = self.pairs.first() {
            first.tap().set_offloads(bits)?;
        }
        self.offloads = bits;
        Ok(())
    }

    /// Sets the tap's filter for an interface with the address `own`. Without `CTRL_RX` the driver receives all frames.
    fn apply_filter(&self, own: MacAddress) -> std::io::Result<()> {
        let everything = ReceiveFilter::default();
        let filter = if self.features & feature::CTRL_RX == 0 { &everything } else { &self.filter };
        // The filter belongs to the interface, too.
        self.pairs.first().map_or(Ok(()), |first| first.tap().set_filter(&filter.tun_filter(own)))
    }
}

impl Device for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn acknowledge(&mut self, features: u64) {
        let mut queue_pairs = self.inner.queue_pairs();
        queue_pairs.features = features;
        let negotiated = features & feature::GUEST_OFFLOADS;
        let offloads = queue_pairs.restored.take().map_or(negotiated, |restored| restored & negotiated);
        if let Err(error) = queue_pairs.set_offloads(offloads) {
            guest_error!("cannot set the guest's offloads on a tap: {error}");
        }
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        // struct virtio_net_config up to `mtu` (Virtio 1.2, 5.1.4)
        let config_space = self.inner.config_space();
        let mut config = config_space.mac.to_vec();
        let status = if config_space.up { LINK_UP } else { 0 };
        config.extend([status, config_space.max_pairs, config_space.mtu].into_iter().flat_map(u16::to_le_bytes));
        read_config(&config, offset, data);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (self.kind(), ring.index());
        let inner = self.inner.clone();
        inner.config_space().interrupt = Some(ring.interrupt().clone());
        let failed = |source| StartError::Thread { device, index, source };
        match self.queue_role(index) {
            None => Err(StartError::NoSuchQueue { device, index }),
            Some(QueueRole::Control) => {
                if self.control.is_some() {
                    return Err(StartError::Running { device, index });
                }
                let thread = QueueThread::run("net-ctl", ThreadKind::NetControl, ring, move |ring, stop| {
                    queue_thread::serve(
                        ring,
                        stop,
                        |_, request| Err(request),
                        |memory, request| inner.serve_command(memory, request),
                    )
                });
                self.control = Some(thread.map_err(failed)?);
                Ok(())
            }
            Some(QueueRole::Data { pair, side }) => {
                let mut queue_pairs = self.inner.queue_pairs();
                let features = queue_pairs.features;
                let pair = queue_pairs.pairs.get_mut(pair).ok_or(StartError::NoSuchQueue { device, index })?;
                if pair.is_running(side) {
                    return Err(StartError::Running { device, index });
                }
                let on_removed = move || inner.report_link_down();
                pair.start(side, ring, features, &self.inner.metrics, on_removed).map_err(failed)
            }
        }
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        match self.queue_role(index)? {
            QueueRole::Control => self.control.take()?.stop(),
            QueueRole::Data { pair, side } => self.inner.queue_pairs().pairs.get_mut(pair)?.stop(side),
        }
    }

    fn reset(&mut self) {
        if let Some(control) = self.control.take() {
            control.stop();
        }
        let mut queue_pairs = self.inner.queue_pairs();
        for pair in &mut queue_pairs.pairs {
            for side in 0..2 {
                pair.stop(side);
            }
        }
        queue_pairs.features = 0;
        queue_pairs.restored = None;
        queue_pairs.filter = ReceiveFilter::default();
        let reset = [queue_pairs.set_active(1), queue_pairs.set_offloads(0), queue_pairs.apply_filter(self.mac)];
        if let Some(error) = reset.into_iter().find_map(Result::err) {
            guest_error!("cannot reset a tap: {error}");
        }
        let mut config_space = self.inner.config_space();
        config_space.mac = self.mac;
        config_space.interrupt = None;
    }

    fn save(&self) -> DeviceState {
        let queue_pairs = self.inner.queue_pairs();
        let config_space = self.inner.config_space();
        let (pairs, offloads) = (queue_pairs.active, queue_pairs.offloads);
        DeviceState::Net(NetState { mac: config_space.mac, max_pairs: config_space.max_pairs, pairs, offloads })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        let NetState { mac, max_pairs, pairs, offloads } = match state {
            DeviceState::Net(state) => state,
            other => return Err(other.wrong(self.kind())),
        };
        let differs = |what, saved: String, here: String| StateError::differs(self.kind(), what, saved, here);
        let here = self.inner.config_space().max_pairs;
        if max_pairs != here || !(1..=here).contains(&pairs) {
            return Err(differs("pairs", format!("{pairs} of {max_pairs}"), here.to_string()));
        }
        let offered_offloads = self.features & feature::GUEST_OFFLOADS;
        if offloads & !offered_offloads != 0 {
            return Err(differs("offloads", format!("{offloads:#x}"), format!("{offered_offloads:#x}")));
        }
        let mut queue_pairs = self.inner.queue_pairs();
        if let Err(error) = queue_pairs.set_active(pairs).and_then(|()| queue_pairs.set_offloads(offloads)) {
            return Err(differs("tap", format!("{pairs} queues, offloads {offloads:#x}"), error.to_string()));
        }
        queue_pairs.restored = Some(offloads);
        self.inner.config_space().mac = mac;
        Ok(())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.reset();
    }
}

impl std::fmt::Debug for ConfigSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConfigSpace").field("mac", &self.mac).field("up", &self.up).finish_non_exhaustive()
    }
}
