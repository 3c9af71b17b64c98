//! The floor of a mount: a FUSE file system with one file, which lies in the daemon's own memory.
//!
//! It has everything that makes FUSE fast at no cost (several threads, a device each, large requests), and
//! does only what no file system can avoid: the kernel asks it, and it copies. What a mount of far memory
//! takes beyond that is the cost of far memory.
//!
//! A large answer goes through a buffer of the thread's own. The kernel copies slowly from memory that is not
//! in the processor's cache; `memcpy` prefetches, and leaves the bytes in the cache for the kernel's copy.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyWrite, Request, Session, WriteFlags,
};
use rustix::mm::Advice;
use rustix_futex_sync::RwLock;

use super::aligned::Aligned;

/// The file's name.
pub const FILE: &str = "data";
const FILE_INODE: INodeNo = INodeNo(2);
/// Attributes never change, so the kernel need not ask again while this runs.
const FOR_EVER: Duration = Duration::from_secs(1 << 20);
/// The largest request, as for the mount.
const MAX_REQUEST_BYTES: u32 = farpool_wire::MAX_TRANSFER_BYTES as u32;

/// Mounts it on `dir` with a file of `bytes`, calls `on_ready`, and serves with `threads` threads until
/// `stop` receives a message or its sender is dropped. Then unmounts it.
pub fn serve_fuse_floor(
    dir: &Path,
    bytes: usize,
    threads: usize,
    on_ready: impl FnOnce() -> Result<()>,
    stop: &Receiver<()>,
) -> Result<()> {
    let mut config = Config::default();
    config.n_threads = Some(threads);
    config.clone_fd = true;
    let session = Session::new(MemoryFile::new(bytes), dir, &config);
    let session = session.with_context(|| format!("cannot mount on {}", dir.display()))?;
    let running = session.spawn().context("cannot start threads")?;
    on_ready()?;
    let _ = stop.recv(); // an error means that the sender is gone: stop as well
    running.umount_and_join().context("cannot unmount")
}

/// Answers of at least this length go through a thread's buffer; for shorter ones the second copy costs more
/// than it saves.
const BUFFERED_BYTES: usize = 64 << 10;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

struct MemoryFile {
    /// Behind a lock that readers share; without contention it costs a few nanoseconds.
    memory: RwLock<Aligned>,
    bytes: usize,
}

impl MemoryFile {
    fn new(bytes: usize) -> Self {
        let mut memory = Aligned::new(bytes);
        // Large pages, as the nodes' memory has; without them the floor is a little slower.
        // SAFETY: the range is exactly `memory`, which is alive and exclusive here; the advice changes no
        // contents.
        let _ = unsafe { rustix::mm::madvise(memory.as_mut_ptr().cast(), bytes, Advice::LinuxHugepage) };
        MemoryFile { memory: RwLock::new(memory), bytes }
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            FILE_INODE => (FileType::RegularFile, 0o644, self.bytes as u64),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn range(&self, offset: u64, length: usize) -> std::ops::Range<usize> {
        let start = usize::try_from(offset).map_or(self.bytes, |offset| offset.min(self.bytes));
        start..start.saturating_add(length).min(self.bytes)
    }
}

impl Filesystem for MemoryFile {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // An older kernel works without them, or with the nearest value that it supports.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(MAX_REQUEST_BYTES);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE_INODE).filter(|_| parent == INodeNo::ROOT && name == FILE) {
            Some(attributes) => reply.entry(&FOR_EVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&FOR_EVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let memory = self.memory.read();
        let asked = &memory[self.range(offset, size as usize)];
        if asked.len() < BUFFERED_BYTES {
            return reply.data(asked);
        }
        BUFFER.with_borrow_mut(|buffer| {
            buffer.clear();
            buffer.extend_from_slice(asked);
            reply.data(buffer);
        });
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _origin: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let range = self.range(offset, data.len());
        let written = range.len();
        self.memory.write()[range].copy_from_slice(&data[..written]);
        reply.written(written as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_where_the_file_does() {
        let file = MemoryFile::new(10_000);
        assert_eq!(file.range(8192, 8192), 8192..10_000);
        assert_eq!(file.range(u64::MAX, 1), 10_000..10_000);
        assert_eq!(file.range(0, 512), 0..512);
    }
}
