//! The part of rdma-core's C interface that we use: layouts of `infiniband/verbs.h` and `rdma/rdma_cma.h`,
//! written by hand from the headers under their BSD license. The interface has been stable since rdma-core 13
//! (2017).
//!
//! Fields that are never used are merged into padding. Sizes and offsets are those of the 64-bit ABI; the end
//! of this file checks them. Structures that only the libraries allocate are cut off after the last field in
//! use.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `struct ibv_device`; only its address is used.
#[repr(C)]
pub struct Device {
    _opaque: [u8; 0],
}

/// `struct ibv_context`, up to what is used.
#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
}

/// `struct ibv_context_ops`: the calls that the headers make inline.
#[repr(C)]
pub struct ContextOps {
    _before_alloc_mw: [usize; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_uint) -> *mut Mw>,
    _bind_mw: usize,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _create_cq: usize,
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_post_send: [usize; 12],
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _behind_post_recv: [usize; 5],
}

/// `struct ibv_pd`; only its address is used.
#[repr(C)]
pub struct Pd {
    _opaque: [u8; 0],
}

/// `struct ibv_mr`.
#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_mw`.
#[repr(C)]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
    pub handle: u32,
    pub kind: c_uint,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// `struct ibv_cq`, up to what is used.
#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
}

/// `struct ibv_qp`, up to what is used.
#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    _before_qp_num: [u8; 44],
    pub qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub struct DeviceAttr {
    _before_caps: [u64; 14],
    _max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    _max_sge: [c_int; 3],
    pub max_cqe: c_int,
    _max_mr: [c_int; 2],
    pub max_qp_rd_atom: c_int,
    _max_ee: [c_int; 2],
    pub max_qp_init_rd_atom: c_int,
    _max_ee_init: c_int,
    pub atomic_cap: c_uint,
    _max_rdd: [c_int; 2],
    pub max_mw: c_int,
    _rest: [u8; 52],
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`.
#[repr(C)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub wr: Remote,
    pub qp_type: u64,
    pub bind_mw: BindMw,
}

/// The union `wr` of [`SendWr`].
#[repr(C)]
pub union Remote {
    pub rdma: RemotePlace,
    pub atomic: RemoteAtomic,
}

/// `wr.rdma`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RemotePlace {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// `wr.atomic`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RemoteAtomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// `bind_mw` of [`SendWr`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BindMw {
    pub mw: *mut Mw,
    pub rkey: u32,
    pub bind_info: MwBindInfo,
}

/// `struct ibv_mw_bind_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MwBindInfo {
    pub mr: *mut Mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct rdma_event_channel`.
#[repr(C)]
pub struct RdmaEventChannel {
    pub fd: c_int,
}

/// `struct rdma_cm_id`, up to what is used.
#[repr(C)]
pub struct RdmaCmId {
    pub verbs: *mut Context,
    pub channel: *mut RdmaEventChannel,
    pub context: *mut c_void,
    pub qp: *mut Qp,
    pub src_addr: SockAddr,
    pub dst_addr: SockAddr,
    pub sgid: [u8; 16],
    pub dgid: [u8; 16],
    _pkey: u64,
    _path_rec: *mut c_void,
    _num_paths: u64,
    pub ps: c_uint,
    pub port_num: u8,
}

/// Room for any socket address: `struct sockaddr_storage`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct SockAddr(pub [u8; 128]);

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RdmaConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `struct rdma_cm_event`, with the union's part for connections.
#[repr(C)]
pub struct RdmaCmEvent {
    pub id: *mut RdmaCmId,
    pub listen_id: *mut RdmaCmId,
    pub event: c_uint,
    pub status: c_int,
    pub conn: RdmaConnParam,
    _rest: [u64; 4],
}

pub const WC_SUCCESS: c_uint = 0;
pub const WC_LOC_LEN_ERR: c_uint = 1;
pub const WC_REM_ACCESS_ERR: c_uint = 10;

pub const WR_RDMA_WRITE: c_uint = 0;
pub const WR_SEND: c_uint = 2;
pub const WR_RDMA_READ: c_uint = 4;
pub const WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
pub const WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;
pub const WR_BIND_MW: c_uint = 8;

pub const SEND_FENCE: c_uint = 1;
pub const SEND_SIGNALED: c_uint = 2;
pub const SEND_INLINE: c_uint = 8;

pub const ACCESS_LOCAL_WRITE: c_int = 1;
pub const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;
pub const ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;
pub const ACCESS_MW_BIND: c_int = 1 << 4;

pub const DEVICE_MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
pub const DEVICE_MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
pub const MW_TYPE_2: c_uint = 2;
pub const ATOMIC_NONE: c_uint = 0;
pub const QPT_RC: c_uint = 2;

pub const RDMA_PS_TCP: c_uint = 0x0106;
pub const RDMA_OPTION_ID: c_int = 0;
pub const RDMA_OPTION_ID_REUSEADDR: c_int = 1;
pub const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;

pub const EVENT_ADDR_RESOLVED: c_uint = 0;
pub const EVENT_ROUTE_RESOLVED: c_uint = 2;
pub const EVENT_CONNECT_REQUEST: c_uint = 4;
pub const EVENT_REJECTED: c_uint = 8;
pub const EVENT_ESTABLISHED: c_uint = 9;
pub const EVENT_DEVICE_REMOVAL: c_uint = 11;
pub const EVENT_TIMEWAIT_EXIT: c_uint = 15;

macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($function:ident($($argument:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$doc])*
        pub struct $name {
            $(pub $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $name {
            /// Looks all functions up.
            ///
            /// # Safety
            /// `library` is the library that the name says, so its functions have these types. It stays
            /// loaded.
            pub unsafe fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok($name {
                    $($function: {
                        let name = concat!(stringify!($function), "\0");
                        // SAFETY: the type is that of the header, by the caller's promise.
                        *unsafe { library.get(name.as_bytes()) }?
                    },)*
                })
            }
        }
    };
}

functions! {
    /// Functions of `libibverbs.so.1`.
    Verbs {
        ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
        ibv_get_device_name(*mut Device) -> *const c_char;
        ibv_alloc_pd(*mut Context) -> *mut Pd;
        ibv_dealloc_pd(*mut Pd) -> c_int;
        ibv_reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        ibv_dereg_mr(*mut Mr) -> c_int;
        ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
        ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
        ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
        ibv_destroy_cq(*mut Cq) -> c_int;
        ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events(*mut Cq, c_uint);
    }
}

functions! {
    /// Functions of `librdmacm.so.1`.
    Cm {
        rdma_get_devices(*mut c_int) -> *mut *mut Context;
        rdma_free_devices(*mut *mut Context);
        rdma_create_event_channel() -> *mut RdmaEventChannel;
        rdma_destroy_event_channel(*mut RdmaEventChannel);
        rdma_create_id(*mut RdmaEventChannel, *mut *mut RdmaCmId, *mut c_void, c_uint) -> c_int;
        rdma_destroy_id(*mut RdmaCmId) -> c_int;
        rdma_bind_addr(*mut RdmaCmId, *mut SockAddr) -> c_int;
        rdma_resolve_addr(*mut RdmaCmId, *mut SockAddr, *mut SockAddr, c_int) -> c_int;
        rdma_resolve_route(*mut RdmaCmId, c_int) -> c_int;
        rdma_create_qp(*mut RdmaCmId, *mut Pd, *mut QpInitAttr) -> c_int;
        rdma_destroy_qp(*mut RdmaCmId);
        rdma_connect(*mut RdmaCmId, *mut RdmaConnParam) -> c_int;
        rdma_listen(*mut RdmaCmId, c_int) -> c_int;
        rdma_accept(*mut RdmaCmId, *mut RdmaConnParam) -> c_int;
        rdma_reject(*mut RdmaCmId, *const c_void, u8) -> c_int;
        rdma_disconnect(*mut RdmaCmId) -> c_int;
        rdma_get_cm_event(*mut RdmaEventChannel, *mut *mut RdmaCmEvent) -> c_int;
        rdma_ack_cm_event(*mut RdmaCmEvent) -> c_int;
        rdma_get_src_port(*mut RdmaCmId) -> u16;
        rdma_set_option(*mut RdmaCmId, c_int, c_int, *mut c_void, usize) -> c_int;
    }
}

/// Sizes and offsets from a C compiler with the headers of rdma-core 44, on x86-64 and aarch64.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(Context, ops) == 8);
    assert!(size_of::<ContextOps>() == 256);
    assert!(offset_of!(ContextOps, alloc_mw) == 56);
    assert!(offset_of!(ContextOps, dealloc_mw) == 72);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(ContextOps, post_recv) == 208);
    assert!(size_of::<DeviceAttr>() == 232);
    assert!(offset_of!(DeviceAttr, device_cap_flags) == 116);
    assert!(offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttr, atomic_cap) == 164);
    assert!(offset_of!(DeviceAttr, max_mw) == 176);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(size_of::<Mw>() == 32 && offset_of!(Mw, rkey) == 16);
    assert!(size_of::<CompChannel>() == 16 && offset_of!(CompChannel, fd) == 8);
    assert!(offset_of!(Qp, qp_num) == 52);
    assert!(size_of::<Sge>() == 16);
    assert!(size_of::<SendWr>() == 128);
    assert!(offset_of!(SendWr, sg_list) == 16);
    assert!(offset_of!(SendWr, opcode) == 28);
    assert!(offset_of!(SendWr, send_flags) == 32);
    assert!(offset_of!(SendWr, wr) == 40);
    assert!(offset_of!(RemotePlace, rkey) == 8);
    assert!(offset_of!(RemoteAtomic, compare_add) == 8);
    assert!(offset_of!(RemoteAtomic, swap) == 16 && offset_of!(RemoteAtomic, rkey) == 24);
    assert!(offset_of!(SendWr, qp_type) == 72);
    assert!(offset_of!(SendWr, bind_mw) == 80);
    assert!(offset_of!(BindMw, rkey) == 8 && offset_of!(BindMw, bind_info) == 16);
    assert!(size_of::<MwBindInfo>() == 32);
    assert!(size_of::<RecvWr>() == 32);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, byte_len) == 20 && offset_of!(Wc, qp_num) == 28);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(offset_of!(QpInitAttr, cap) == 32 && offset_of!(QpInitAttr, qp_type) == 52);
    assert!(size_of::<QpCap>() == 20);
    assert!(offset_of!(RdmaCmId, qp) == 24 && offset_of!(RdmaCmId, src_addr) == 32);
    assert!(offset_of!(RdmaCmId, dst_addr) == 160 && offset_of!(RdmaCmId, sgid) == 288);
    assert!(offset_of!(RdmaCmId, ps) == 344 && offset_of!(RdmaCmId, port_num) == 348);
    assert!(size_of::<RdmaConnParam>() == 24);
    assert!(offset_of!(RdmaConnParam, retry_count) == 12 && offset_of!(RdmaConnParam, qp_num) == 16);
    assert!(size_of::<RdmaCmEvent>() == 80);
    assert!(offset_of!(RdmaCmEvent, event) == 16 && offset_of!(RdmaCmEvent, conn) == 24);
};
