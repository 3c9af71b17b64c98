//! How pages outlast a restart of the database.
//!
//! While no process of the database runs, any program may change its files, and nothing invalidates their
//! pages. So a database that ends cleanly *signs* its files: the index notes a *signature* of each, which
//! follows from what the file system says of the file's last change (`signatures`). A database that starts
//! compares the signatures with the files.
//!
//! R1. A file keeps its pages only if it was signed when the database ended, and still has this signature.
//!     Every other file gets another content id (C3) before the database uses it.
//! R2. A file is signed only if a later change would give it another signature: a file system's clock has
//!     ticks, and two changes within one tick look alike.

use std::collections::BTreeMap;

use crate::caller::{Caller, fresh_content_id};
use crate::files::{FileId, load_id, update};
use crate::ground::Ground;
use crate::layout;
use crate::rules::Rules;
use crate::words::{Door, FileWord};

/// A number for one state of a file; another state has another number (R2). Never 0, which means *not
/// signed*.
pub type Signature = u64;

impl<G: Ground, R: Rules> Caller<G, R> {
    /// The files of which pages may be found. `None`: there is no index, or this process cannot use it.
    pub async fn open_files(&mut self) -> Option<Vec<FileId>> {
        self.occupying(async |caller| {
            let door = Door::of(caller.ground.load(layout::DOOR).await);
            if door == Door::Closed || !caller.load_layout().await {
                return None;
            }
            let mut open = Vec::new();
            for file in 0..caller.layout.shape().files {
                if FileWord(caller.ground.load(caller.layout.file(file)).await).is_open() {
                    open.push(load_id(&caller.ground, &caller.layout, file).await);
                }
            }
            Some(open)
        })
        .await
    }

    /// Signs files: the database has ended. Returns how many of them the cache knows.
    pub async fn sign_files(&mut self, signatures: &BTreeMap<FileId, Signature>) -> usize {
        self.occupying(async |caller| {
            if caller.door_for_changes().await.is_none() {
                return 0;
            }
            let mut signed = 0;
            for file in 0..caller.layout.shape().files {
                // The entry keeps its file until this place is left (N3).
                let is_open = FileWord(caller.ground.load(caller.layout.file(file)).await).is_open();
                let id = load_id(&caller.ground, &caller.layout, file).await;
                if let Some(signature) = signatures.get(&id).filter(|_| is_open) {
                    caller.ground.store(caller.layout.signature(file), *signature).await;
                    signed += 1;
                }
            }
            signed
        })
        .await
    }

    /// Takes the pages away from each file that has another signature than when it was signed, or was not
    /// signed: the database starts, and none of its processes uses a file yet. Returns how many files keep
    /// their pages. `None`: no page of any file will be found, because the door is closed.
    pub async fn resume_files(&mut self, signatures: &BTreeMap<FileId, Signature>) -> Option<usize> {
        self.occupying(async |caller| {
            caller.door_for_changes().await?;
            let mut kept = 0;
            for file in 0..caller.layout.shape().files {
                kept += usize::from(caller.resume_file(file, signatures).await);
            }
            Some(kept)
        })
        .await
    }

    /// Resumes the file of an entry. A signature is used once: afterwards the database may change the file.
    async fn resume_file(&self, file: u32, signatures: &BTreeMap<FileId, Signature>) -> bool {
        let at = self.layout.signature(file);
        let signed = self.ground.load(at).await;
        self.ground.store(at, 0).await;
        let is_open = FileWord(self.ground.load(self.layout.file(file)).await).is_open();
        let found = signatures.get(&load_id(&self.ground, &self.layout, file).await).copied();
        if is_open && R::keeps_pages(signed, found) {
            return true;
        }
        let id = fresh_content_id(&self.ground).await;
        update(&self.ground, &self.layout, file, |word| word.change_begun().change_ended(id)).await;
        false
    }
}
