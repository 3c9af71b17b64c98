//! The connection manager: identifiers (`rdma_cm_id`), their queue pairs, and events.
//!
//! Events are copied and acknowledged as soon as they are taken, so that destroying an identifier never has
//! to wait.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use crate::device::{Device, Port};
use crate::error::VerbsError;
use crate::ffi;
use crate::library::Library;
use crate::memory::Domain;

/// Retransmissions before a queue pair gives up: the most that the field can hold.
const RETRIES: u8 = 7;
/// Retries when the receiver has no buffer ready (seven would mean for ever). Receivers post a buffer for
/// each message that may arrive, so this only bridges a moment.
const RECEIVER_RETRIES: u8 = 6;
/// Bounds of the exponent for the time of one attempt, which is 4.096 us times two to the exponent. With less
/// than 4 ms, a busy peer looks dead; with more than half a second, one lost packet costs too much.
const ACK_TIMEOUT_EXPONENTS: (u8, u8) = (10, 17);

/// The channel on which the events of identifiers arrive.
pub(crate) struct EventChannel {
    library: &'static Library,
    raw: NonNull<ffi::RdmaEventChannel>,
}

// SAFETY: a handle of librdmacm, which may be called from any thread.
unsafe impl Send for EventChannel {}
// SAFETY: librdmacm locks what its calls on one handle share.
unsafe impl Sync for EventChannel {}

/// An event, copied.
pub(crate) struct Event {
    /// The identifier that the event belongs to, by its address ([`CmId::key`]).
    pub(crate) id: usize,
    pub(crate) kind: u32,
    pub(crate) status: i32,
    pub(crate) private_data: Vec<u8>,
    /// The peer's limits: how many READs and atomics it serves at once, and how many of its own it has in
    /// flight.
    pub(crate) depths: (u8, u8),
    /// The new identifier of a connection request.
    pub(crate) request: Option<CmId>,
}

impl EventChannel {
    pub(crate) fn new(library: &'static Library) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: no preconditions.
        let raw = NonNull::new(unsafe { (library.cm.rdma_create_event_channel)() });
        let raw = raw.ok_or_else(|| {
            VerbsError::last("opening the RDMA connection manager (/dev/infiniband/rdma_cm)")
        })?;
        let channel = EventChannel { library, raw };
        rustix::io::ioctl_fionbio(channel.fd(), true).map_err(|error| VerbsError::Call {
            what: "setting up the connection manager",
            source: error.into(),
        })?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live until drop.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// Takes the next event; `None` when there is none.
    pub(crate) fn next(self: &Arc<Self>) -> io::Result<Option<Event>> {
        let mut raw = null_mut();
        // SAFETY: the channel lives; it is non-blocking.
        if unsafe { (self.library.cm.rdma_get_cm_event)(self.raw.as_ptr(), &mut raw) } != 0 {
            let error = io::Error::last_os_error();
            let none = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            return if none { Ok(None) } else { Err(error) };
        }
        // SAFETY: the event is valid until it is acknowledged below.
        let event = unsafe { &*raw };
        let conn = &event.conn;
        let has_data = !conn.private_data.is_null() && conn.private_data_len > 0;
        // SAFETY: the library's copy of `private_data_len` bytes, valid until the acknowledgement.
        let data = has_data.then(|| unsafe {
            std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into())
        });
        let request = (event.event == ffi::EVENT_CONNECT_REQUEST)
            .then(|| NonNull::new(event.id))
            .flatten()
            .map(|raw| CmId { library: self.library, raw, _channel: self.clone() });
        let copied = Event {
            id: event.id as usize,
            kind: event.event,
            status: event.status,
            private_data: data.unwrap_or_default().to_vec(),
            depths: (conn.responder_resources, conn.initiator_depth),
            request,
        };
        // SAFETY: taken above, acknowledged once, and not used afterwards.
        unsafe { (self.library.cm.rdma_ack_cm_event)(raw) };
        Ok(Some(copied))
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold a reference to their channel, so none is left; all events were
        // acknowledged.
        unsafe { (self.library.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// An identifier of the connection manager, and its queue pair once it has one.
pub(crate) struct CmId {
    library: &'static Library,
    raw: NonNull<ffi::RdmaCmId>,
    _channel: Arc<EventChannel>,
}

// SAFETY: a handle of librdmacm, which may be called from any thread.
unsafe impl Send for CmId {}

/// Limits of a connection.
#[derive(Clone, Copy)]
pub(crate) struct Depths {
    /// READs and atomics of the peer that our card serves at once.
    pub(crate) responder: u8,
    /// Our own READs and atomics in flight.
    pub(crate) initiator: u8,
}

impl CmId {
    pub(crate) fn new(channel: &Arc<EventChannel>) -> Result<Self, VerbsError> {
        let mut raw = null_mut();
        // SAFETY: the channel lives; `raw` is written on success.
        let failed = unsafe {
            (channel.library.cm.rdma_create_id)(channel.raw.as_ptr(), &mut raw, null_mut(), ffi::RDMA_PS_TCP)
        };
        let raw = NonNull::new(raw).filter(|_| failed == 0);
        let raw = raw.ok_or_else(|| VerbsError::last("making an RDMA connection identifier"))?;
        Ok(CmId { library: channel.library, raw, _channel: channel.clone() })
    }

    /// The value by which events name it.
    pub(crate) fn key(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// Binds to a local address, and thus to the device that has it. Checks the port and the chosen GID.
    pub(crate) fn bind(&self, local: SocketAddr) -> Result<Device, VerbsError> {
        let mut address = to_c(local);
        // SAFETY: the identifier lives; the address is read during the call.
        if unsafe { (self.library.cm.rdma_bind_addr)(self.raw.as_ptr(), &mut address) } != 0 {
            let source = io::Error::last_os_error();
            let absent = matches!(source.raw_os_error(), Some(libc::ENODEV | libc::EADDRNOTAVAIL));
            return Err(match absent {
                true => VerbsError::NoDeviceAt { address: local.ip() },
                false => VerbsError::Call { what: "binding an RDMA address", source },
            });
        }
        // SAFETY: the identifier lives, and binding has filled these in.
        let (context, gid, port) = unsafe {
            let id = self.raw.as_ref();
            (id.verbs, id.sgid, id.port_num)
        };
        let context = NonNull::new(context).ok_or(VerbsError::NoDeviceAt { address: local.ip() })?;
        let device = Device::new(context);
        Port::new(device.name(self.library), port).check(local.ip(), &gid)?;
        Ok(device)
    }

    /// Allows an address to be listened on again at once.
    pub(crate) fn reuse_address(&self) -> Result<(), VerbsError> {
        let one = 1i32;
        self.set(ffi::RDMA_OPTION_ID_REUSEADDR, &one.to_ne_bytes(), "reusing an RDMA address")
    }

    fn set(&self, option: i32, value: &[u8], what: &'static str) -> Result<(), VerbsError> {
        let mut value = value.to_vec();
        // SAFETY: the value is read during the call, with the length given.
        let failed = unsafe {
            let pointer = value.as_mut_ptr().cast();
            (self.library.cm.rdma_set_option)(
                self.raw.as_ptr(),
                ffi::RDMA_OPTION_ID,
                option,
                pointer,
                value.len(),
            )
        };
        if failed == 0 { Ok(()) } else { Err(VerbsError::last(what)) }
    }

    /// Spreads a queue pair's retransmissions over about half of an operation's deadline; the rest is for the
    /// node.
    pub(crate) fn follow_deadline(&self, deadline: Duration) {
        let exponent = ack_timeout_exponent(deadline);
        if let Err(error) = self.set(ffi::RDMA_OPTION_ID_ACK_TIMEOUT, &[exponent], "setting a timeout") {
            tracing::debug!(%error, "queue pairs keep the device's own timeout; deadlines still hold");
        }
    }

    pub(crate) fn resolve_address(&self, peer: SocketAddr, timeout: Duration) -> Result<(), VerbsError> {
        let mut address = to_c(peer);
        let timeout = timeout.as_millis().min(i32::MAX as u128) as i32;
        // SAFETY: the identifier lives until drop; the address is read during the call.
        let failed = unsafe {
            (self.library.cm.rdma_resolve_addr)(self.raw.as_ptr(), null_mut(), &mut address, timeout)
        };
        if failed == 0 { Ok(()) } else { Err(VerbsError::last("resolving an RDMA address")) }
    }

    pub(crate) fn resolve_route(&self, timeout: Duration) -> Result<(), VerbsError> {
        let timeout = timeout.as_millis().min(i32::MAX as u128) as i32;
        // SAFETY: the identifier lives.
        let failed = unsafe { (self.library.cm.rdma_resolve_route)(self.raw.as_ptr(), timeout) };
        if failed == 0 { Ok(()) } else { Err(VerbsError::last("resolving an RDMA route")) }
    }

    /// Makes the queue pair. Returns how many bytes it can send inline.
    ///
    /// # Safety
    /// `completions` and `domain` outlive the queue pair, which lives until [`CmId::destroy_queue_pair`] or
    /// drop.
    pub(crate) unsafe fn create_queue_pair(
        &self,
        domain: &Domain,
        completions: *mut ffi::Cq,
        cap: ffi::QpCap,
    ) -> Result<u32, VerbsError> {
        let mut cap = cap;
        loop {
            let mut attributes = ffi::QpInitAttr {
                qp_context: null_mut(),
                send_cq: completions,
                recv_cq: completions,
                srq: null_mut(),
                cap,
                qp_type: ffi::QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: the identifier is bound to the device of the domain and of the queue.
            let failed =
                unsafe { (self.library.cm.rdma_create_qp)(self.raw.as_ptr(), domain.raw(), &mut attributes) };
            if failed == 0 {
                return Ok(attributes.cap.max_inline_data.min(cap.max_inline_data));
            }
            if cap.max_inline_data == 0 {
                return Err(VerbsError::last("making a queue pair"));
            }
            cap.max_inline_data /= 2; // a card's limit on inline data cannot be queried, only tried
        }
    }

    /// Destroys the queue pair. After this, the card accesses no memory for it.
    pub(crate) fn destroy_queue_pair(&self) {
        // SAFETY: the identifier lives; without a queue pair there is nothing to do.
        unsafe {
            if !self.raw.as_ref().qp.is_null() {
                (self.library.cm.rdma_destroy_qp)(self.raw.as_ptr());
            }
        }
    }

    pub(crate) fn connect(&self, private_data: &[u8], depths: Depths) -> Result<(), VerbsError> {
        let mut parameters = parameters(private_data, depths);
        // SAFETY: the parameters and the data are read during the call.
        let failed = unsafe { (self.library.cm.rdma_connect)(self.raw.as_ptr(), &mut parameters) };
        if failed == 0 { Ok(()) } else { Err(VerbsError::last("connecting over RDMA")) }
    }

    pub(crate) fn accept(&self, private_data: &[u8], depths: Depths) -> Result<(), VerbsError> {
        let mut parameters = parameters(private_data, depths);
        // SAFETY: the parameters and the data are read during the call.
        let failed = unsafe { (self.library.cm.rdma_accept)(self.raw.as_ptr(), &mut parameters) };
        if failed == 0 { Ok(()) } else { Err(VerbsError::last("accepting an RDMA connection")) }
    }

    pub(crate) fn reject(&self, private_data: &[u8]) {
        // SAFETY: the data are read during the call. If it fails, the peer runs into its own timeout.
        unsafe {
            (self.library.cm.rdma_reject)(
                self.raw.as_ptr(),
                private_data.as_ptr().cast(),
                private_data.len() as u8,
            );
        }
    }

    /// Tells the peer, and puts the queue pair in the error state if it is not there yet.
    pub(crate) fn disconnect(&self) {
        // SAFETY: the identifier lives.
        unsafe { (self.library.cm.rdma_disconnect)(self.raw.as_ptr()) };
    }

    pub(crate) fn listen(&self, backlog: i32) -> Result<(), VerbsError> {
        // SAFETY: the identifier lives.
        let failed = unsafe { (self.library.cm.rdma_listen)(self.raw.as_ptr(), backlog) };
        if failed == 0 { Ok(()) } else { Err(VerbsError::last("listening for RDMA connections")) }
    }

    pub(crate) fn local_port(&self) -> u16 {
        // SAFETY: the identifier lives.
        u16::from_be(unsafe { (self.library.cm.rdma_get_src_port)(self.raw.as_ptr()) })
    }

    /// The address of the other side of a connection or of a connection request.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier lives; the library has filled in the address before the event that announced
        // the peer.
        from_c(&unsafe { self.raw.as_ref() }.dst_addr)
    }

    /// Hands a chain of work requests to the card: one doorbell.
    ///
    /// # Safety
    /// The chain is well formed. The memory that it names stays valid, and is used for nothing else, until
    /// each request has completed or the queue pair is destroyed.
    pub(crate) unsafe fn post_send(&self, first: *mut ffi::SendWr) -> io::Result<()> {
        let qp = self.queue_pair()?;
        let mut bad = null_mut();
        // SAFETY: the queue pair lives as long as the identifier; the rest is the caller's promise.
        let failed = unsafe {
            let post = (*(*qp).context).ops.post_send.ok_or(io::ErrorKind::Unsupported)?;
            post(qp, first, &mut bad)
        };
        if failed == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(failed)) }
    }

    /// Posts a receive buffer for one message.
    ///
    /// # Safety
    /// As for [`CmId::post_send`]; the card writes to the memory.
    pub(crate) unsafe fn post_receive(&self, request: &mut ffi::RecvWr) -> io::Result<()> {
        let qp = self.queue_pair()?;
        let mut bad = null_mut();
        // SAFETY: the queue pair lives as long as the identifier; the rest is the caller's promise.
        let failed = unsafe {
            let post = (*(*qp).context).ops.post_recv.ok_or(io::ErrorKind::Unsupported)?;
            post(qp, request, &mut bad)
        };
        if failed == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(failed)) }
    }

    fn queue_pair(&self) -> io::Result<*mut ffi::Qp> {
        // SAFETY: the identifier lives.
        let qp = unsafe { self.raw.as_ref() }.qp;
        if qp.is_null() { Err(io::ErrorKind::NotConnected.into()) } else { Ok(qp) }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        self.destroy_queue_pair();
        // SAFETY: made by the connection manager, destroyed once; its events are acknowledged as they are
        // taken.
        unsafe { (self.library.cm.rdma_destroy_id)(self.raw.as_ptr()) };
    }
}

fn parameters(private_data: &[u8], depths: Depths) -> ffi::RdmaConnParam {
    ffi::RdmaConnParam {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len() as u8,
        responder_resources: depths.responder,
        initiator_depth: depths.initiator,
        flow_control: 0,
        retry_count: RETRIES,
        rnr_retry_count: RECEIVER_RETRIES,
        srq: 0,
        qp_num: 0,
    }
}

/// The largest exponent with which all attempts fit in half the deadline, within sensible bounds.
fn ack_timeout_exponent(deadline: Duration) -> u8 {
    let one_attempt_ns = deadline.as_nanos() / 2 / (RETRIES as u128 + 1);
    let (least, most) = ACK_TIMEOUT_EXPONENTS;
    (least..=most).rev().find(|&exponent| 4096u128 << exponent <= one_attempt_ns).unwrap_or(least)
}

fn to_c(address: SocketAddr) -> ffi::SockAddr {
    let mut bytes = [0; 128];
    let family = match address {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => bytes[4..8].copy_from_slice(&v4.ip().octets()),
        SocketAddr::V6(v6) => {
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
        }
    }
    ffi::SockAddr(bytes)
}

/// `None` for an address that is neither IPv4 nor IPv6.
fn from_c(address: &ffi::SockAddr) -> Option<SocketAddr> {
    let bytes = &address.0;
    let part = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match i32::from(u16::from_ne_bytes([bytes[0], bytes[1]])) {
        libc::AF_INET => Some(SocketAddr::from((part(4), port))),
        libc::AF_INET6 => {
            let ip: [u8; 16] = bytes[8..24].try_into().expect("16 bytes");
            let (flow, scope) = (u32::from_be_bytes(part(4)), u32::from_ne_bytes(part(24)));
            Some(SocketAddrV6::new(ip.into(), port, flow, scope).into())
        }
        _ => None,
    }
}

/// The local address from which the kernel would reach `peer`. It is found by connecting a datagram socket,
/// which sends nothing.
pub(crate) fn local_address_towards(peer: SocketAddr) -> io::Result<SocketAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    let mut local = socket.local_addr()?;
    local.set_port(0);
    Ok(local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retransmissions_fit_the_deadline_unless_it_is_too_short_for_any() {
        for ms in [200, 300, 1000, 5000, 60_000] {
            let deadline = Duration::from_millis(ms);
            let all_ns = (4096u128 << ack_timeout_exponent(deadline)) * 8;
            assert!(all_ns <= deadline.as_nanos() / 2, "{ms} ms");
        }
        assert_eq!(ack_timeout_exponent(Duration::from_millis(1)), ACK_TIMEOUT_EXPONENTS.0);
        assert_eq!(ack_timeout_exponent(Duration::from_secs(600)), ACK_TIMEOUT_EXPONENTS.1);
    }

    #[test]
    fn addresses_are_laid_out_as_the_system_does() {
        let v4 = to_c("10.9.0.1:4791".parse().unwrap()).0;
        assert_eq!(v4[..8], [2, 0, 0x12, 0xb7, 10, 9, 0, 1]);
        let v6 = to_c("[fe80::1]:1".parse().unwrap()).0;
        assert_eq!(v6[..4], [10, 0, 0, 1]);
        assert_eq!(v6[8..24], [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        for address in ["10.9.0.1:4791", "[fe80::1]:1"] {
            let address = address.parse().unwrap();
            assert_eq!(from_c(&to_c(address)), Some(address));
        }
        assert_eq!(from_c(&ffi::SockAddr([0; 128])), None);
    }

    #[test]
    fn a_peer_on_this_machine_is_reached_from_its_own_address() {
        let local = local_address_towards("127.0.0.1:9".parse().unwrap()).unwrap();
        assert_eq!(local.ip(), IpAddr::from(Ipv4Addr::LOCALHOST));
    }
}
