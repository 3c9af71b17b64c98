//! Requests about the contents of files.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use farpool_file::{MAX_FILE_BYTES, Session};
use fuser::{Errno, FileHandle, INodeNo, ReplyAttr, ReplyData, ReplyWrite};

use super::stat::Stat;
use super::{FarFs, Outcome, Repeating};
use crate::body::Body;
use crate::errno::Failure;
use crate::handles::{Handle, Standing};
use crate::namespace::{Ino, Kind, Ownership};
use crate::worker::{contained, with_session};

/// How long a truncation waits for the flusher while it tells the kernel an earlier size. The flusher takes
/// the lock of a page, which a worker may have to read first.
const PATIENCE: Duration = Duration::from_secs(15);

impl FarFs {
    /// The body of a new file in the directory `parent`.
    pub(super) fn empty_body(&self, parent: Ino) -> Outcome<Arc<Body>> {
        Ok(Arc::new(Body::new(self.store.create_as(self.redundancy_in(parent)?))))
    }

    pub(super) fn open_file(&self, ino: Ino, flags: i32) -> Outcome<u64> {
        let body = {
            let mut names = self.names_mut()?;
            if flags & libc::O_TRUNC != 0 {
                names.drop_privileges(ino)?;
            }
            names.open(ino)?.clone()
        };
        let writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if writable {
            body.add_writer();
        }
        let handle = Handle { ino, body: body.clone(), writable, standing: Standing::Plain };
        let opened = self.admit(&body).and_then(|()| {
            // Growth by direct clients (called *guests* in the code) has ended: the kernel will take the file
            // for empty.
            let emptied = if flags & libc::O_TRUNC != 0 { self.empty(&body) } else { Ok(()) };
            let inserted = emptied.and_then(|()| Ok(self.handles.insert(handle)?));
            inserted.inspect_err(|_| self.dismiss(ino, &body, Standing::Plain))
        });
        if opened.is_err() {
            if writable {
                body.remove_writer();
            }
            self.close_inode(ino);
        }
        opened
    }

    /// The kernel has found no such name. If it exists after all, `O_CREAT` opens that file.
    pub(super) fn create_file(
        &self,
        parent: Ino,
        name: &OsStr,
        own: Ownership,
        flags: i32,
    ) -> Outcome<(Stat, u64)> {
        let kind = Kind::File(self.empty_body(parent)?);
        let stat = match self.make(parent, name, kind, own) {
            Err(Failure(Errno::EEXIST)) if flags & libc::O_EXCL == 0 => self.look_up(parent, name)?,
            made => made?,
        };
        let ino = stat.ino();
        match self.open_file(ino, flags) {
            Ok(handle) => Ok((stat, handle)),
            Err(failure) => {
                // The kernel is not told of the inode.
                self.forget_all(&[(ino, 1)]);
                Err(failure)
            }
        }
    }

    pub(super) fn close_file(&self, handle: u64) {
        if let Some(Handle { ino, body, writable, standing }) = self.handles.remove(handle) {
            self.dismiss(ino, &body, standing);
            if writable {
                body.remove_writer();
            }
            drop(body);
            self.close_inode(ino);
        }
    }

    fn empty(&self, body: &Body) -> Outcome<()> {
        self.resize(body, 0).map(|()| body.mark_written(SystemTime::now()))
    }

    /// Answers an `open` once the kernel knows the size of the file (S3).
    pub(super) fn once_opened(&self, node: INodeNo, handle: u64, answer: impl FnOnce() + Send + 'static) {
        let Some(body) = self.handles.get(handle) else { return };
        if self.once_kernel_is_up_to_date(node, &body, answer).is_err() {
            self.close_file(handle); // the kernel gets EIO, and so never closes the handle
        }
    }

    /// Sends attributes whose size the kernel will use (S2).
    pub(super) fn send_size(&self, node: INodeNo, body: &Arc<Body>, reply: ReplyAttr) {
        self.end_growth(body);
        let stat = match self.stat(Ino(node.0)) {
            Ok(stat) => stat,
            Err(Failure(errno)) => return reply.error(errno),
        };
        // On an error the request is answered already: the dropped reply says EIO.
        let _ = self
            .once_kernel_is_up_to_date(node, body, move || reply.attr(&stat.lifetime(), &stat.complete()));
    }

    /// Answers a direct write that has failed. The kernel takes everything beyond the size that it knows for
    /// a part of that write, and truncates it. So it is told the size first (S3).
    pub(super) fn send_failed_write(
        &self,
        node: INodeNo,
        handle: FileHandle,
        errno: Errno,
        reply: ReplyWrite,
    ) {
        let Some(body) = self.handles.get(handle.0) else { return reply.error(errno) };
        self.end_growth(&body);
        let _ = self.once_kernel_is_up_to_date(node, &body, move || reply.error(errno));
    }

    fn close_inode(&self, ino: Ino) {
        let ended = self.namespace.write().release(ino);
        drop(ended); // frees far memory, without the lock
    }

    /// Sends the data directly from the session's arena.
    pub(super) fn read_file(&self, handle: u64, offset: u64, size: usize, reply: ReplyData) {
        let body = match self.opened(handle) {
            Ok(body) => body,
            Err(Failure(errno)) => return reply.error(errno),
        };
        // The kernel accepts writes beyond the largest size of a file. Later it asks for such pages, which it
        // could not store.
        let end = offset.saturating_add(size as u64);
        if end > MAX_FILE_BYTES && body.failure().is_some() {
            return reply.error(Errno::EIO);
        }
        with_session(&self.store, |session| match body.far.read(session, offset, size) {
            Ok(data) => reply.data(&data),
            Err(error) => reply.error(Failure::from(error).0),
        });
    }

    /// `accepted`: the kernel has already told the writer that the write succeeded (M4, M5).
    pub(super) fn write_file(&self, handle: u64, offset: u64, data: &[u8], accepted: bool) -> Outcome<u32> {
        let body = self.opened(handle)?;
        let written = with_session(&self.store, |session| body.far.write(session, offset, data));
        if let Err(error) = written {
            let failure = Failure::from(error);
            if accepted {
                let bytes = data.len();
                let kind = Repeating::NotStored(failure.0.code());
                if let Some(left_out) = self.warnings.occurs(kind, Instant::now()) {
                    tracing::warn!(
                        %error, offset, bytes, left_out,
                        "written data could not be stored and is lost"
                    );
                }
                body.far.mark_lost(offset, data.len() as u64, error);
                body.fail(failure.0);
            }
            return Err(failure);
        }
        body.mark_written(SystemTime::now());
        Ok(data.len() as u32)
    }

    pub(super) fn allocate(&self, handle: u64, offset: u64, length: u64, mode: i32) -> Outcome<()> {
        let body = self.opened(handle)?;
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let end = offset.checked_add(length).ok_or(Errno::EFBIG)?;
        let far = &body.far;
        self.end_growth(&body); // the size must not change between reading and setting it
        let work = |session: &Session| -> Outcome<()> {
            match mode & !libc::FALLOC_FL_KEEP_SIZE {
                0 => far.reserve(session, offset, length)?,
                libc::FALLOC_FL_PUNCH_HOLE if keep_size => far.punch(session, offset, length)?,
                libc::FALLOC_FL_ZERO_RANGE => {
                    far.punch(session, offset, length)?;
                    far.reserve(session, offset, length)?;
                }
                _ => return Err(Errno::EOPNOTSUPP.into()),
            }
            if !keep_size && end > far.size() {
                far.set_size(session, end)?;
            }
            Ok(())
        };
        with_session(&self.store, work)?;
        body.mark_written(SystemTime::now());
        Ok(())
    }

    /// This is part of requests about names. So a panic is caught here, and poisons the file instead of the
    /// names (M1).
    pub(super) fn resize(&self, body: &Body, size: u64) -> Outcome<()> {
        check_usable(body)?;
        let resize = || with_session(&self.store, |session| body.far.set_size(session, size));
        let resized = contained(&self.bell, resize);
        // The flusher must not tell the kernel an earlier, larger size after this request is answered.
        drop(body.telling.try_lock_for(PATIENCE).ok_or(Errno::EIO)?);
        match resized {
            Some(resized) => {
                resized?;
                if size == 0 {
                    body.recover();
                }
                Ok(())
            }
            None => {
                body.poison();
                Err(Errno::EIO.into())
            }
        }
    }

    pub(super) fn opened(&self, handle: u64) -> Outcome<Arc<Body>> {
        let body = self.handles.get(handle).ok_or(Errno::EBADF)?;
        check_usable(&body)?;
        Ok(body)
    }
}

fn check_usable(body: &Body) -> Outcome<()> {
    if body.is_poisoned() { Err(Errno::EIO.into()) } else { Ok(()) }
}
