//! Attributes as `stat` shows them: first from the namespace, then, once its lock is released, from the
//! file's body (M3).

use std::sync::Arc;
use std::time::Duration;

use farpool_wire::BLOCK_BYTES;
use fuser::{FileAttr, FileType, INodeNo};

use super::CACHED;
use crate::body::Body;
use crate::namespace::{Attributes, Ino, Kind};

/// Unit of `st_blocks`, whatever the block size.
const SECTOR_BYTES: u64 = 512;
/// The size of a directory, as on most file systems; some tools take 0 for *cannot be read*.
const DIRECTORY_BYTES: u64 = 4096;

/// Attributes that still lack what the file's body knows.
pub(crate) struct Stat {
    attributes: FileAttr,
    body: Option<Arc<Body>>,
}

impl Stat {
    pub(crate) fn new(attributes: &Attributes<'_, Arc<Body>>) -> Self {
        let (own, times) = (attributes.ownership, attributes.times);
        let (size, body) = match attributes.kind {
            Kind::File(body) => (0, Some(body.clone())),
            Kind::Directory => (DIRECTORY_BYTES, None),
            Kind::Symlink(target) => (target.len() as u64, None),
            Kind::Fifo | Kind::Socket => (0, None),
        };
        let attributes = FileAttr {
            ino: INodeNo(attributes.ino.0),
            size,
            blocks: 0,
            atime: times.accessed,
            mtime: times.modified,
            ctime: times.changed,
            crtime: times.changed,
            kind: file_type(attributes.kind),
            perm: own.mode as u16,
            nlink: attributes.nlink,
            uid: own.uid,
            gid: own.gid,
            rdev: 0,
            // A write of less than a block first reads the rest of the block.
            blksize: BLOCK_BYTES as u32,
            flags: 0,
        };
        Stat { attributes, body }
    }

    /// How long the kernel may use the attributes without asking. Call it before
    /// [`complete`](Self::complete).
    pub(crate) fn lifetime(&self) -> Duration {
        let is_lasting = self.body.as_ref().is_none_or(|body| body.growth.is_known());
        if is_lasting { CACHED } else { Duration::ZERO }
    }

    /// Adds what the body knows. Call it without the namespace's lock.
    pub(crate) fn complete(self) -> FileAttr {
        let Stat { mut attributes, body } = self;
        if let Some(body) = body {
            attributes.size = body.far.size();
            attributes.blocks = body.far.allocated_bytes() / SECTOR_BYTES;
            if let Some(written) = body.written() {
                attributes.mtime = written;
                attributes.ctime = attributes.ctime.max(written);
            }
        }
        attributes
    }

    pub(crate) fn ino(&self) -> Ino {
        Ino(self.attributes.ino.0)
    }

    pub(crate) fn body(&self) -> Option<&Arc<Body>> {
        self.body.as_ref()
    }
}

pub(crate) fn file_type<F>(kind: &Kind<F>) -> FileType {
    match kind {
        Kind::File(_) => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink(_) => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
    }
}
