//! The files that the cache knows: how a process finds the number of a file, and asks for one.
//!
//! N1. A file is *open* only while no other entry of the table has its id. Otherwise two processes could use
//!     two numbers for it, and a writer would not empty the entries that a reader finds.
//! N2. The keeper opens an entry only after every call has ended that was running when the entry had its
//!     file's id. Such a call may have looked for the file before the entry was there, and then uses the file
//!     as if there were no cache. A file that was unlinked is not asked for any more.
//! N3. An entry is given to another file only after every place has been left that was occupied when it was
//!     retired. A file is retired when it is unlinked, or when other files need its entry and it has not been
//!     read for the longest time.

use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::words::FileWord;

/// What tells a file from all other files of its host, also from those that had its inode before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FileId {
    /// The device on which it lies.
    pub device: u64,
    /// The inode.
    pub inode: u64,
    /// How often the inode was used before.
    pub generation: u64,
}

/// An entry of the table: its number, and its incarnation, which tells it from all entries that had the
/// number before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileRef {
    pub(crate) file: u32,
    pub(crate) incarnation: u64,
}

/// A file as one process knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownFile {
    id: FileId,
    /// Where it was found last.
    last: Option<FileRef>,
}

impl KnownFile {
    /// A file that has not been looked for.
    pub fn new(id: FileId) -> KnownFile {
        KnownFile { id, last: None }
    }

    /// The number under which it was found last.
    pub(crate) fn last_number(&self) -> Option<u32> {
        self.last.map(|last| last.file)
    }

    /// Which file it is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Finds its entry. It does not change until the place is left.
    pub(crate) async fn find<G: Ground>(&mut self, ground: &G, layout: &Layout) -> Option<FileRef> {
        if let Some(last) = self.last
            && last.file < layout.shape().files
            && ground.load(layout.incarnation(last.file)).await == last.incarnation
        {
            return self.last;
        }
        self.last = None;
        for file in layout.file_set(self.id) {
            let incarnation = ground.load(layout.incarnation(file)).await;
            // Incarnations never repeat: if it is the same afterwards, the id is that of this entry. The id
            // is complete once the file was asked for: before, it may look like that of another file.
            if incarnation != 0
                && FileWord(ground.load(layout.file(file)).await).is_live()
                && load_id(ground, layout, file).await == self.id
                && ground.load(layout.incarnation(file)).await == incarnation
            {
                self.last = Some(FileRef { file, incarnation });
                break;
            }
        }
        self.last
    }
}

pub(crate) async fn load_id<G: Ground>(ground: &G, layout: &Layout, file: u32) -> FileId {
    let [device, inode, generation] = layout.file_id(file);
    FileId {
        device: ground.load(device).await,
        inode: ground.load(inode).await,
        generation: ground.load(generation).await,
    }
}

/// Notes that a file is used.
pub(crate) async fn note_use<G: Ground>(ground: &G, layout: &Layout, file: FileRef) {
    let used = layout.file_used(file.file);
    if ground.load(used).await == 0 {
        ground.store(used, 1).await;
    }
}

/// Asks the keeper to open a file that was not found, if it still `exists`. If the part of the table where it
/// would be found is full, asks the keeper to make room.
pub(crate) async fn ask_for<G: Ground>(
    ground: &G,
    layout: &Layout,
    id: FileId,
    exists: impl AsyncFn() -> bool,
) {
    if !exists().await {
        return;
    }
    for file in layout.file_set(id) {
        if ground.load(layout.incarnation(file)).await != 0 {
            continue;
        }
        let incarnation = ground.add(layout::NEXT_INCARNATION, 1).await.wrapping_add(1);
        if incarnation == 0 || !ground.replace(layout.incarnation(file), 0, incarnation).await {
            continue;
        }
        let [device, inode, generation] = layout.file_id(file);
        ground.store(device, id.device).await;
        ground.store(inode, id.inode).await;
        ground.store(generation, id.generation).await;
        update(ground, layout, file, FileWord::asked_for).await;
        // Either the process that unlinks the file finds the entry, or this one sees that the file is gone.
        ground.barrier().await;
        if !exists().await {
            update(ground, layout, file, FileWord::retired).await;
        }
        return;
    }
    let full = layout.set_full(layout.file_set(id).start);
    if ground.load(full).await == 0 {
        ground.store(full, 1).await;
    }
}

/// Retires all entries of a file. There are two if one of them was retired to make room and is not free yet.
pub(crate) async fn retire<G: Ground>(ground: &G, layout: &Layout, id: FileId) {
    for file in layout.file_set(id) {
        if load_id(ground, layout, file).await == id {
            update(ground, layout, file, FileWord::retired).await;
        }
    }
}

/// Changes a file's word.
pub(crate) async fn update<G: Ground>(
    ground: &G,
    layout: &Layout,
    file: u32,
    change: impl Fn(FileWord) -> FileWord,
) {
    let at = layout.file(file);
    loop {
        let word = FileWord(ground.load(at).await);
        if ground.replace(at, word.0, change(word).0).await {
            return;
        }
    }
}
