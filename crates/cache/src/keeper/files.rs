//! The keeper opens files that were asked for, and frees entries of files that were retired. Where the table
//! is full, it retires the file that was not used for the longest time.

use std::collections::{BTreeMap, BTreeSet};

use super::Keeper;
use crate::caller::fresh_content_id;
use crate::files::{self, load_id};
use crate::grace::Grace;
use crate::ground::Ground;
use crate::layout::{FILE_WAYS, Layout};
use crate::rules::Rules;
use crate::words::FileWord;

/// Entries that one round looks at.
const FILES_PER_ROUND: u32 = 4_096;

/// What the keeper knows of the files' table.
#[derive(Debug)]
pub(super) struct Files {
    next: u32,
    /// Of each entry, for how many rounds over the table it was not used.
    unused: Vec<u16>,
    /// Entries of pinned files.
    pinned: BTreeSet<u32>,
    /// Entries that wait to be opened, if they were asked for, or else to be freed.
    waiting: BTreeMap<u32, Waiting>,
}

/// The wait of an entry. If the entry has changed meanwhile, it waits again.
#[derive(Debug)]
struct Waiting {
    word: FileWord,
    incarnation: u64,
    grace: Grace,
}

/// What becomes of an entry if another one has the same file.
enum Duplicate {
    /// It is retired, for the other one.
    Retire,
    /// It waits until the other one has been retired or freed.
    Wait,
}

impl Files {
    pub(super) fn new(layout: &Layout) -> Files {
        let unused = vec![0; layout.shape().files as usize];
        Files { next: 0, unused, pinned: BTreeSet::new(), waiting: BTreeMap::new() }
    }
}

impl<G: Ground, R: Rules> Keeper<G, R> {
    /// Whether entries wait to be opened or freed.
    pub(super) fn files_have_work(&self) -> bool {
        !self.files.waiting.is_empty()
    }

    /// Opens files that were asked for, and frees entries of retired ones. Call it regularly: a later call
    /// does what an earlier one has begun to wait for.
    pub async fn maintain_files(&mut self) {
        let files = self.layout.shape().files;
        let waiting: Vec<u32> = self.files.waiting.keys().copied().collect();
        let slice = self.files.next..files.min(self.files.next.saturating_add(FILES_PER_ROUND));
        self.files.next = if slice.end == files { 0 } else { slice.end };
        for file in slice.clone() {
            self.note_use(file).await;
            self.note_pin(file).await;
            self.make_room(file).await;
        }
        // One wait for all that begin to wait in this round: what they wait for has happened before.
        let mut grace = None;
        for file in waiting.into_iter().chain(slice) {
            self.maintain_file(file, &mut grace).await;
        }
    }

    /// Counts for how long a file was not used.
    async fn note_use(&mut self, file: u32) {
        let at = self.layout.file_used(file);
        let unused = &mut self.files.unused[file as usize];
        *unused = unused.saturating_add(1);
        if self.ground.load(at).await != 0 {
            *unused = 0;
            self.ground.store(at, 0).await;
        }
    }

    /// Notes whether a file is pinned.
    async fn note_pin(&mut self, file: u32) {
        if self.ground.load(self.layout.file_pinned(file)).await == 0 {
            self.files.pinned.remove(&file);
        } else {
            self.files.pinned.insert(file);
        }
    }

    /// The content ids of pinned files.
    pub(super) async fn pinned_ids(&self) -> BTreeSet<u32> {
        let mut ids = BTreeSet::new();
        for file in &self.files.pinned {
            ids.extend(FileWord(self.ground.load(self.layout.file(*file)).await).usable_id());
        }
        ids
    }

    /// Retires a file if the set that begins at this number is full, and a process has asked for room there.
    async fn make_room(&mut self, first: u32) {
        let full = self.layout.set_full(first);
        if self.ground.load(full).await == 0 {
            return;
        }
        self.ground.store(full, 0).await;
        let mut longest = None;
        for file in first..self.layout.shape().files.min(first + FILE_WAYS) {
            let unused = self.files.unused[file as usize];
            let is_open = FileWord(self.ground.load(self.layout.file(file)).await).is_open();
            if is_open && unused >= R::UNUSED_ROUNDS && !self.files.pinned.contains(&file) {
                longest = longest.max(Some((unused, file)));
            }
        }
        if let Some((_, file)) = longest {
            files::update(&self.ground, &self.layout, file, FileWord::retired).await;
        }
    }

    /// Opens or frees an entry that is not open, if nobody can know of what it was before; or begins to wait
    /// for that.
    async fn maintain_file(&mut self, file: u32, grace: &mut Option<Grace>) {
        let incarnation = self.ground.load(self.layout.incarnation(file)).await;
        let word = FileWord(self.ground.load(self.layout.file(file)).await);
        let waiting = self.files.waiting.remove(&file);
        if incarnation == 0 || word.is_open() || word.changes() != 0 {
            return; // nothing, open, or in use
        }
        let is_same = |waiting: &Waiting| (waiting.word, waiting.incarnation) == (word, incarnation);
        let waiting = waiting.filter(is_same);
        let is_over = match &waiting {
            Some(waiting) => {
                !R::files_wait() || waiting.grace.is_over(&self.ground, self.layout.shape().places).await
            }
            None => false,
        };
        // After the wait: a process that was in its place may have stored the same id meanwhile.
        match self.find_duplicate(file, word).await {
            None => {}
            Some(Duplicate::Wait) => return,
            Some(Duplicate::Retire) => {
                self.ground.replace(self.layout.file(file), word.0, word.retired().0).await;
                return;
            }
        }
        if is_over {
            self.open_or_free(file, word).await;
            return;
        }
        let grace = match (&waiting, *grace) {
            (Some(waiting), _) => waiting.grace,
            (None, Some(grace)) => grace,
            (None, None) => *grace.insert(Grace::begin(&self.ground).await),
        };
        self.files.waiting.insert(file, Waiting { word, incarnation, grace });
    }

    /// Opens an entry if it was asked for, or else frees it.
    async fn open_or_free(&mut self, file: u32, word: FileWord) {
        let at = self.layout.file(file);
        if word.is_asked_for() {
            let id = fresh_content_id(&self.ground).await;
            self.files.unused[file as usize] = 0;
            self.ground.replace(at, word.0, FileWord::open(id).0).await;
        } else if self.ground.replace(at, word.0, 0).await {
            self.clear(file).await;
        }
    }

    /// What is to become of an entry that was asked for, if another one has the same file (N1).
    async fn find_duplicate(&self, file: u32, word: FileWord) -> Option<Duplicate> {
        if !word.is_asked_for() || !R::files_are_unique() {
            return None;
        }
        let id = load_id(&self.ground, &self.layout, file).await;
        for other in self.layout.file_set(id).filter(|other| *other != file) {
            let has_file = self.ground.load(self.layout.incarnation(other)).await != 0;
            if has_file && load_id(&self.ground, &self.layout, other).await == id {
                let theirs = FileWord(self.ground.load(self.layout.file(other)).await);
                let is_first = theirs.is_open() || theirs.is_asked_for() && other < file;
                return Some(if is_first { Duplicate::Retire } else { Duplicate::Wait });
            }
        }
        None
    }

    /// Frees an entry. Its incarnation goes last: from then on the entry can be taken.
    async fn clear(&self, file: u32) {
        let others = [self.layout.file_pinned(file), self.layout.signature(file)];
        for at in self.layout.file_id(file).into_iter().chain(others) {
            self.ground.store(at, 0).await;
        }
        self.ground.store(self.layout.incarnation(file), 0).await;
    }

    /// Retires all files: while the door was closed, nobody retired those that were unlinked, and anything
    /// may have changed them.
    pub(super) async fn retire_all_files(&mut self) {
        for file in 0..self.layout.shape().files {
            files::update(&self.ground, &self.layout, file, |word| word.retired()).await;
        }
        self.files.waiting.clear();
    }
}
