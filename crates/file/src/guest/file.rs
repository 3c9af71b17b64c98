//! A direct client's (called *guest* in the code) operations on a file. They follow the owner's protocol, and
//! leave exceptional cases to the owner (G1).

use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_pool::{Extent, SessionCore};
use farpool_wire::BLOCK_BYTES;

use super::layout::Layout;
use super::program::Given;
use super::store::{GuestPlace, GuestStore};
use super::table::DirectBytes;
use crate::file_core::MAX_FILE_BYTES;
use crate::read::{in_pieces, read_verified};
use crate::rules::{Rules, Shipped};
use crate::split::{Piece, pieces};
use crate::write::{Locks, all_to_their_end};

/// How often a piece is read again because a writer changed it meanwhile, before the owner is asked.
const MAX_OVERTAKEN: u32 = 100;

/// The owner has to be asked, by way of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AskOwner;

/// A file to which this process was admitted.
pub struct GuestFileCore<R: Rules = Shipped> {
    store: Arc<GuestStore>,
    layout: Layout,
    rules: PhantomData<R>,
}

impl<R: Rules> GuestFileCore<R> {
    /// Opens a file by the memory that the owner gave out for it.
    ///
    /// # Errors
    /// When it cannot be mapped or is not what it should be.
    pub fn open(store: Arc<GuestStore>, memory: &OwnedFd) -> std::io::Result<Self> {
        Ok(GuestFileCore { store, layout: Layout::open(memory)?, rules: PhantomData })
    }

    /// Whether the file can be worked on now. Only a hint: each operation checks for itself.
    pub fn is_open(&self) -> bool {
        self.layout.is_open()
    }

    /// Reads up to `length` bytes. Returns a buffer of whole blocks, and where in it the bytes lie; no
    /// buffer: no bytes.
    pub async fn read(
        &self,
        core: &SessionCore,
        place: &GuestPlace,
        offset: u64,
        length: usize,
    ) -> Result<(Option<ArenaBuf>, Range<usize>), AskOwner> {
        let at_work = place.enter();
        self.check_open()?;
        let bytes = (length as u64).min(self.layout.size().saturating_sub(offset));
        if bytes == 0 {
            return Ok((None, 0..0));
        }
        let skipped = offset % BLOCK_BYTES as u64;
        let aligned = (skipped + bytes).next_multiple_of(BLOCK_BYTES as u64);
        let buffer = core.buffer(aligned as usize).map_err(|_| AskOwner)?;
        let whole = in_pieces(offset, bytes, buffer, |piece, own| self.read_piece(core, piece, own)).await?;
        at_work.note(DirectBytes { read: bytes, written: 0 });
        Ok((Some(whole), skipped as usize..(skipped + bytes) as usize))
    }

    /// Writes all of `data` at `offset`, making the file longer if need be and allowed (G7).
    pub async fn write(
        &self,
        core: &SessionCore,
        place: &GuestPlace,
        offset: u64,
        data: Given<'_>,
    ) -> Result<(), AskOwner> {
        let at_work = place.enter();
        self.check_open()?;
        let end =
            offset.checked_add(data.len() as u64).filter(|&end| end <= MAX_FILE_BYTES).ok_or(AskOwner)?;
        if end > self.layout.size() && !self.layout.may_grow() {
            return Err(AskOwner);
        }
        let own = |piece: &Piece| data.behind((piece.file_offset(piece.start) - offset) as usize);
        let writes =
            pieces(offset, data.len() as u64).map(|piece| self.write_piece(core, piece, own(&piece)));
        // If the owner has to be asked, it writes all of the data again.
        all_to_their_end(writes).await?;
        if !self.layout.grow_as_guest(R::size_after_write(self.layout.size(), end)) {
            return Err(AskOwner);
        }
        at_work.note(DirectBytes { read: 0, written: data.len() as u64 });
        Ok(())
    }

    /// Notes when the file was written, in nanoseconds since 1970.
    pub fn mark_written(&self, now_ns: u64) {
        self.layout.mark_written(now_ns);
    }

    fn check_open(&self) -> Result<(), AskOwner> {
        // Lost blocks are for the owner to judge.
        if R::guests_may_enter(self.layout.is_open()) && !self.layout.has_losses() {
            Ok(())
        } else {
            Err(AskOwner)
        }
    }

    /// The extent in which a stripe lies now. It is valid until the operation ends, not until the region
    /// does.
    fn extent(&self, stripe: u64) -> Result<Option<Extent>, AskOwner> {
        let Some(number) = self.layout.extent(stripe) else { return Ok(None) };
        self.store.extent(number).map(Some).ok_or(AskOwner)
    }

    async fn read_piece(
        &self,
        core: &SessionCore,
        piece: Piece,
        mut buffer: ArenaBuf,
    ) -> Result<ArenaBuf, AskOwner> {
        let Some(extent) = self.extent(piece.stripe)? else {
            buffer.fill(0);
            return Ok(buffer);
        };
        let words = &self.store.words;
        let read = read_verified::<R>(words, core, piece, &extent, buffer, MAX_OVERTAKEN);
        read.await.map_err(|_| AskOwner)
    }

    /// Writes a piece; its bytes are the first ones of `data`.
    async fn write_piece(&self, core: &SessionCore, piece: Piece, data: Given<'_>) -> Result<(), AskOwner> {
        let extent = self.extent(piece.stripe)?.ok_or(AskOwner)?;
        let region = extent.region();
        let is_of_this_host = region.node.is_near() || region.is_overflow();
        if !is_of_this_host || !self.layout.is_writable() {
            return Err(AskOwner); // G5, G6
        }
        let blocks = piece.first_block()..piece.end_block();
        let locks = Locks::<R>::take(&self.store.words, core, &extent, piece, blocks).await;
        let locks = locks.map_err(|_| AskOwner)?;
        // If the extent was moved meanwhile, or must be moved because a late write may still land there, the
        // owner is asked.
        let in_place = self.layout.extent(piece.stripe) == Some(extent.number());
        if !in_place || self.store.words.is_doubted(&extent) || locks.any(|word| word.is_lost()) {
            return Err(AskOwner);
        }
        locks.store(core, piece, |_| None, |target| data.copy_to(target)).await.map_err(|_| AskOwner)
    }
}
