//! The file system's handlers of kernel requests: each turns a request into a reply, and does nothing else.
//!
//! M1. Every request gets exactly one reply. A handler that panics answers EIO, and poisons the state that it
//!     may have left half changed: one file, or the names of the mount.
//! M2. Reads and writes of open files never take the namespace's lock.
//! M3. The namespace's lock is never held during an operation on far memory, nor while far memory is freed.
//! M4. The kernel collects writes (its write-back cache) and sends them to the daemon soon after. If storing
//!     them fails, the file is marked as failed and its attributes are made invalid. The kernel then asks for
//!     them before the next `write`, and that `write` returns the error of the answer, ENOSPC or EIO. `fsync`
//!     and `close` return it, too.
//! M5. Data that the kernel accepted but that could not be stored is marked as lost: reading it gives EIO,
//!     never zeros or older contents.
//! M6. The kernel may cache names, attributes and pages for as long as it likes, since only its own requests
//!     change them. The exception is a mount with direct clients: processes that work on files without the
//!     kernel (called *guests* in the code, module `guests`). They change contents and times, and never a
//!     size that the kernel relies on, so the kernel collects no writes there. The kernel serialises changes
//!     of a file's size by its inode lock. But it writes pages back at any moment, so crate `file` must allow
//!     a write beside any other operation on the file.
//! M7. The daemon, not the kernel, clears set-user-id bits of files that are written to. Otherwise the kernel
//!     would ask before every write whether the file has an extended attribute that gives privileges.
//! Not here: the rules of names (`namespace`), of far memory (crate `file`), mounting (`attach`).

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use farpool_file::{FileStore, Redundancy};
use farpool_keep::Journal;
use farpool_throttle::Throttles;
use farpool_wire::MAX_TRANSFER_BYTES;
use fuser::{
    CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, Notifier, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::{RwLock, RwLockReadGuard};

use crate::body::Body;
use crate::errno::Failure;
use crate::flusher::Flusher;
use crate::guests::Registry;
use crate::handles::Handles;
use crate::keeping::{Names, NamesMut};
use crate::namespace::{Change, Ino, Kind, Namespace, Ownership};
use crate::worker::{Bell, contained};

mod copying;
mod files;
mod names;
mod seek;
mod stat;
mod volume;
mod xattrs;

use stat::Stat;

/// How long the kernel may use names and attributes without asking. M6 would allow any time. But the kernel
/// accepts writes for as long as it need not ask. So this is also how late a writer may learn that the daemon
/// is gone, and how late the time of a direct write appears.
const CACHED: Duration = Duration::from_secs(1);
/// The kernel keeps the pages of a file after the file is closed, also on a mount with direct clients: before
/// they work on the file, the kernel is made to forget its pages, and while they do, it gets no new ones. The
/// kernel must not drop pages by itself at an `open`. Where it does not collect writes, it would drop them
/// while another process's write is in flight, read the page again before that write has arrived, and keep a
/// page that is then out of date.
const OPENED: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE;
/// Inode numbers are never reused, so all inodes have the same generation.
const GENERATION: Generation = Generation(0);
/// Most bytes of one request: one transfer of the fabric.
const MAX_REQUEST_BYTES: u32 = MAX_TRANSFER_BYTES as u32;
/// Most requests of the kernel's own (readahead, pages that it writes back) in flight; more would only wait
/// behind the worker threads.
const MAX_BACKGROUND: u16 = 64;
/// The capabilities that the daemon asks the kernel for: to collect writes into large ones (M4; not on a
/// mount with direct clients), to truncate a file in `open`, to let several processes read a directory at
/// once, to read directories with attributes, and to keep symbolic links and pages in its cache (M6).
///
/// Not `FUSE_ASYNC_DIO`: with it, the kernel drops its pages of the range before an asynchronous direct
/// write, but not again when the write is done. A page that another process reads in between would stay out
/// of date for good.
const CAPABILITIES: [InitFlags; 7] = [
    InitFlags::FUSE_WRITEBACK_CACHE,
    InitFlags::FUSE_ATOMIC_O_TRUNC,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    InitFlags::FUSE_CACHE_SYMLINKS,
    InitFlags::FUSE_EXPLICIT_INVAL_DATA,
];

pub(crate) type Outcome<T> = Result<T, Failure>;

pub(crate) struct FarFs {
    pub(crate) store: FileStore,
    namespace: RwLock<Namespace<Arc<Body>>>,
    /// The journal to which names are written for a later process, if there is one.
    journal: Option<Arc<dyn Journal>>,
    /// A handler panicked in the namespace and may have left it half changed.
    names_poisoned: AtomicBool,
    pub(crate) handles: Handles,
    bell: Bell,
    kernel: Kernel,
    /// `None`: the kernel answers for data and holes by itself (F3).
    pub(crate) flusher: Option<Flusher>,
    /// Extended attributes are kept only if they do not make every write slower (M7).
    keeps_xattrs: bool,
    /// The registry of direct clients, if the mount allows any.
    pub(crate) registry: Option<Arc<Registry>>,
    /// The redundancy of files for which no other was chosen.
    redundancy: Redundancy,
    pub(crate) warnings: Throttles<Repeating>,
}

/// Warnings that every request might repeat.
#[derive(PartialEq, Eq, Hash, Debug)]
pub(crate) enum Repeating {
    /// Written data could not be stored, with this error number. A pool that stays full does not hide the
    /// loss of a node.
    NotStored(i32),
    /// Too many processes search for data and holes at the same time.
    Seeks,
    /// The kernel has to be told the sizes of too many files at the same time.
    Sizes,
}

/// Sends the kernel notifications; set once the session exists.
pub(crate) type Kernel = Arc<OnceLock<Notifier>>;

impl FarFs {
    /// A file system of these names.
    pub(crate) fn new(
        store: FileStore,
        names: Names,
        bell: Bell,
        kernel: Kernel,
        flusher: Option<Flusher>,
        registry: Option<Arc<Registry>>,
        redundancy: Redundancy,
    ) -> Self {
        let Names { namespace, journal } = names;
        FarFs {
            store,
            namespace: RwLock::new(namespace),
            journal,
            names_poisoned: AtomicBool::new(false),
            handles: Handles::default(),
            bell,
            kernel,
            flusher,
            keeps_xattrs: false,
            registry,
            redundancy,
            warnings: Throttles::default(),
        }
    }

    pub(crate) fn names(&self) -> Outcome<RwLockReadGuard<'_, Namespace<Arc<Body>>>> {
        let names = self.namespace.read();
        self.check_names()?;
        Ok(names)
    }

    fn send_entry(&self, reply: ReplyEntry, result: Outcome<Stat>) {
        match result {
            Ok(stat) => reply.entry(&stat.lifetime(), &stat.complete(), GENERATION),
            Err(Failure(errno)) => reply.error(errno),
        }
    }

    fn send_attributes(&self, reply: ReplyAttr, result: Outcome<Stat>) {
        match result {
            Ok(stat) => reply.attr(&stat.lifetime(), &stat.complete()),
            Err(Failure(errno)) => reply.error(errno),
        }
    }

    fn names_mut(&self) -> Outcome<NamesMut<'_>> {
        let names = self.namespace.write();
        self.check_names()?;
        Ok(NamesMut { names, journal: self.journal.as_ref() })
    }

    fn check_names(&self) -> Outcome<()> {
        // Relaxed, as is the store: a thread that takes the lock after the panic has synchronised with it.
        if self.names_poisoned.load(Ordering::Relaxed) { Err(Errno::EIO.into()) } else { Ok(()) }
    }

    /// Makes the kernel ask for a file's attributes before it accepts more data for it (M4).
    fn ask_before_writing(&self, node: INodeNo) {
        const ATTRIBUTES_ONLY: i64 = -1;
        if let Some(kernel) = self.kernel.get()
            && let Err(error) = kernel.inval_inode(node, ATTRIBUTES_ONLY, 0)
        {
            tracing::debug!(%error, "the kernel has forgotten the file already");
        }
    }

    /// Clears the set-user-id bit of a file to which a process writes that has no right to keep it (M7).
    fn drop_privileges(&self, node: INodeNo) {
        let dropped = self.names_mut().and_then(|mut names| Ok(names.drop_privileges(ino(node))?));
        if let Err(Failure(errno)) = dropped {
            tracing::warn!(?errno, "the privileges of a file that was written to cannot be cleared");
        }
        self.ask_before_writing(node); // the kernel's copy of the mode is out of date
    }

    /// Runs a handler that works on names (M1).
    fn on_names(&self, handler: impl FnOnce()) {
        if contained(&self.bell, handler).is_none() {
            tracing::error!("a handler panicked; the names of this mount are no longer served");
            self.names_poisoned.store(true, Ordering::Relaxed);
        }
    }

    /// Runs a handler that works on the data of an open file (M1).
    fn on_file(&self, handle: FileHandle, handler: impl FnOnce()) {
        if contained(&self.bell, handler).is_none() {
            tracing::error!("a handler panicked; the file it worked on is no longer served");
            if let Some(body) = self.handles.get(handle.0) {
                body.poison();
            }
        }
    }
}

impl Drop for FarFs {
    fn drop(&mut self) {
        if self.journal.is_some() {
            // Files dropped from here on end with this process only: the next process finds them again.
            self.store.core().abandon();
        }
    }
}

fn ino(number: INodeNo) -> Ino {
    Ino(number.0)
}

/// Mode and owner of a new inode.
fn ownership(request: &Request, mode: u32) -> Ownership {
    Ownership { mode, uid: request.uid(), gid: request.gid() }
}

fn send_empty(reply: ReplyEmpty, result: Outcome<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(Failure(errno)) => reply.error(errno),
    }
}

impl Filesystem for FarFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Direct clients would not see writes that the kernel collects, nor the size that it gives a file by
        // them.
        let asked = CAPABILITIES.into_iter();
        for capability in
            asked.filter(|asked| self.registry.is_none() || *asked != InitFlags::FUSE_WRITEBACK_CACHE)
        {
            if let Err(missing) = config.add_capabilities(capability) {
                tracing::debug!(
                    ?missing,
                    "the kernel is too old for these capabilities, and runs without them"
                );
            }
        }
        self.keeps_xattrs = config.add_capabilities(InitFlags::FUSE_HANDLE_KILLPRIV_V2).is_ok();
        // For a value out of range, each setter returns the nearest one that it accepts.
        if let Err(most) = config.set_max_write(MAX_REQUEST_BYTES) {
            tracing::debug!(most, "the kernel limits the size of writes");
        }
        if let Err(most) = config.set_max_readahead(MAX_REQUEST_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.on_names(|| self.send_entry(reply, self.look_up(ino(parent), name)));
    }

    fn forget(&self, _request: &Request, node: INodeNo, count: u64) {
        self.on_names(|| self.forget_all(&[(ino(node), count)]));
    }

    fn getattr(&self, _request: &Request, node: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        if let Some(errno) = handle.and_then(|handle| self.handles.get_writable(handle.0)?.failure()) {
            return reply.error(errno); // M4: asked on behalf of a `write`
        }
        self.on_names(|| match handle.and_then(|handle| self.handles.get(handle.0)) {
            Some(body) => self.send_size(node, &body, reply),
            None => self.send_attributes(reply, self.stat(ino(node))),
        });
    }

    fn setattr(
        &self,
        _request: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _changed_on_macos: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let now = SystemTime::now();
        let time = |wish: TimeOrNow| match wish {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => now,
        };
        let (accessed, modified) = (accessed.map(time), modified.map(time));
        let change = Change { mode, uid, gid, accessed, modified };
        self.on_names(|| self.send_attributes(reply, self.set_attributes(ino(node), size, change, now)));
    }

    fn readlink(&self, _request: &Request, node: INodeNo, reply: ReplyData) {
        self.on_names(|| match self.read_link(ino(node)) {
            Ok(target) => reply.data(target.as_encoded_bytes()),
            Err(Failure(errno)) => reply.error(errno),
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _device: u32,
        reply: ReplyEntry,
    ) {
        self.on_names(|| self.send_entry(reply, self.make_node(ino(parent), name, ownership(request, mode))));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let own = ownership(request, mode);
        self.on_names(|| self.send_entry(reply, self.make(ino(parent), name, Kind::Directory, own)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.on_names(|| send_empty(reply, self.remove_file(ino(parent), name)));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.on_names(|| send_empty(reply, self.remove_directory(ino(parent), name)));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (own, kind) = (ownership(request, 0o777), Kind::Symlink(target.as_os_str().to_owned()));
        self.on_names(|| self.send_entry(reply, self.make(ino(parent), name, kind, own)));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((ino(parent), name), (ino(new_parent), new_name));
        self.on_names(|| send_empty(reply, self.rename_entry(from, to, flags)));
    }

    fn link(&self, _request: &Request, node: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.on_names(|| self.send_entry(reply, self.add_link(ino(node), ino(parent), name)));
    }

    fn open(&self, _request: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.on_names(|| match self.open_file(ino(node), flags.0) {
            Ok(handle) => self.once_opened(node, handle, move || reply.opened(FileHandle(handle), OPENED)),
            Err(Failure(errno)) => reply.error(errno),
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let own = ownership(request, mode);
        self.on_names(|| match self.create_file(ino(parent), name, own, flags) {
            Ok((stat, handle)) => {
                let (node, fh) = (INodeNo(stat.ino().0), FileHandle(handle));
                let answer =
                    move || reply.created(&stat.lifetime(), &stat.complete(), GENERATION, fh, OPENED);
                self.once_opened(node, handle, answer);
            }
            Err(Failure(errno)) => reply.error(errno),
        });
    }

    fn read(
        &self,
        _request: &Request,
        _node: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.on_file(handle, || self.read_file(handle.0, offset, size as usize, reply));
    }

    fn write(
        &self,
        _request: &Request,
        node: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        origin: WriteFlags,
        _flags: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let accepted = origin.contains(WriteFlags::FUSE_WRITE_CACHE);
        if origin.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
            self.on_names(|| self.drop_privileges(node));
        }
        self.on_file(handle, || match self.write_file(handle.0, offset, data, accepted) {
            Ok(written) => reply.written(written),
            // After a failed direct write the kernel truncates the file to the size that it knows.
            Err(Failure(errno)) if owner.is_some() => self.send_failed_write(node, handle, errno, reply),
            Err(Failure(errno)) => {
                if accepted {
                    // Before the reply: `fsync` returns with the reply, and a later `write` must get the
                    // error. The call would wait for the kernel to drop the inode, but the kernel writes all
                    // pages back before it drops one.
                    self.ask_before_writing(node);
                }
                reply.error(errno);
            }
        });
    }

    fn ioctl(
        &self,
        request: &Request,
        _node: INodeNo,
        handle: FileHandle,
        _flags: IoctlFlags,
        command: u32,
        _data: &[u8],
        _room: u32,
        reply: ReplyIoctl,
    ) {
        self.on_file(handle, || self.answer_ioctl(handle.0, command, request.uid(), reply));
    }

    fn lseek(
        &self,
        _request: &Request,
        node: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.on_file(handle, || self.seek(node, handle.0, offset, whence, reply));
    }

    fn fallocate(
        &self,
        _request: &Request,
        _node: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.on_file(handle, || send_empty(reply, self.allocate(handle.0, offset, length, mode)));
    }

    fn release(
        &self,
        _request: &Request,
        _node: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.on_names(|| {
            self.close_file(handle.0);
            reply.ok();
        });
    }

    /// A write is in far memory when it returns, and pages of mappings arrive as writes before this request.
    /// But the kernel has to ask. If the daemon has just been killed, a write by the kernel itself fails
    /// without telling any process; only this request returns an error.
    fn fsync(&self, _request: &Request, _node: INodeNo, _handle: FileHandle, _data: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    /// Changes of names are complete when the call returns. ENOSYS counts as success, and tells the kernel
    /// not to ask again.
    fn fsyncdir(
        &self,
        _request: &Request,
        _node: INodeNo,
        _handle: FileHandle,
        _data: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn flush(
        &self,
        _request: &Request,
        _node: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // With a journal, callers rely on the result of a `close` after the daemon was killed (see `fsync`).
        if self.journal.is_some() { reply.ok() } else { reply.error(Errno::ENOSYS) }
    }

    fn readdir(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectory,
    ) {
        self.on_names(|| self.list(ino(node), cookie, reply));
    }

    fn readdirplus(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.on_names(|| self.list_with_attributes(ino(node), cookie, reply));
    }

    fn copy_file_range(
        &self,
        _request: &Request,
        _from: INodeNo,
        from_handle: FileHandle,
        from_offset: u64,
        _to: INodeNo,
        to_handle: FileHandle,
        to_offset: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let (from, to) = ((from_handle.0, from_offset), (to_handle.0, to_offset));
        self.on_file(to_handle, || match self.copy_range(from, to, length) {
            Ok(copied) => reply.written(copied),
            Err(Failure(errno)) => reply.error(errno),
        });
    }

    fn setxattr(
        &self,
        _request: &Request,
        node: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.on_names(|| send_empty(reply, self.set_xattr(ino(node), name, value, flags)));
    }

    fn getxattr(&self, _request: &Request, node: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.on_names(|| xattrs::send_bytes(reply, size, self.get_xattr(ino(node), name)));
    }

    fn listxattr(&self, _request: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        self.on_names(|| xattrs::send_bytes(reply, size, self.list_xattrs(ino(node))));
    }

    fn removexattr(&self, _request: &Request, node: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.on_names(|| send_empty(reply, self.remove_xattr(ino(node), name)));
    }

    fn statfs(&self, _request: &Request, _node: INodeNo, reply: ReplyStatfs) {
        self.on_names(|| self.send_capacity(reply));
    }
}
