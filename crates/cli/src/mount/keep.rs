//! `farpool mount --keep DIR`: files that are there again after the daemon was killed.

use std::path::Path;

use anyhow::{Context, Result};
use farpool_file::{FileStore, KEPT_WORDS_BYTES};
use farpool_keep::{Found, KeepDir, Kept};
use farpool_mount::{KeptMount, kept_files};
use farpool_pool::{Pool, PoolConfig};

use crate::output::say;
use crate::size::ByteSize;

/// How long a successor has once the daemon has ended cleanly: the time of a lease, less what it takes to
/// start.
const RESTART_WITHIN_S: u64 = 8;

/// The directory of a mount's state, and the mount that was found in it.
pub struct Keeping {
    dir: KeepDir,
    kept: Kept,
}

impl Keeping {
    /// Takes the directory, and says what is in it.
    pub fn open(path: &Path) -> Result<Self> {
        let (dir, found) = KeepDir::open(path, KEPT_WORDS_BYTES)?;
        let kept = match found {
            Found::State(kept) => kept,
            Found::Nothing => Kept::default(),
            Found::EarlierBoot => {
                say(format!(
                    "empty  {} was left before this host was started again: its files are gone",
                    path.display()
                ));
                Kept::default()
            }
        };
        Ok(Keeping { dir, kept })
    }

    /// The store with its files, as far as their leases still run.
    pub fn store(&mut self, config: PoolConfig) -> Result<(FileStore, KeptMount)> {
        let kept = std::mem::take(&mut self.kept);
        let journal = self.dir.journal();
        let (pool, adoption) = Pool::connect_keeping(config, journal.clone(), &kept)?;
        let wanted = kept_files(&kept);
        let words = self.dir.words().try_clone().context("cannot share the words of blocks")?;
        let (store, files) = FileStore::keeping(pool, words, &kept, adoption, |file| wanted.contains(&file))
            .context("cannot start the file store")?;
        if !wanted.is_empty() {
            let bytes: u64 = files.values().map(|file| file.allocated_bytes()).sum();
            say(format!("found  {} with {}", files_of(files.len()), ByteSize(bytes)));
            let losses: Vec<u64> =
                files.values().map(|file| file.core().lost_bytes()).filter(|lost| *lost > 0).collect();
            if !losses.is_empty() {
                let lost = ByteSize(losses.iter().sum());
                say(format!(
                    "lost   {lost} in {}: leases or nodes have ended, reading there gives EIO",
                    files_of(losses.len())
                ));
            }
        }
        let kept = KeptMount::new(journal, kept, store.clone(), files);
        Ok((store, kept))
    }

    /// What becomes of the files now that the mount is gone.
    pub fn say_goodbye(&self, path: &Path) {
        if self.dir.journal().is_whole() {
            say(format!(
                "kept   for about {RESTART_WITHIN_S} s: mount again with --keep {} to find the files again",
                path.display()
            ));
        }
    }
}

fn files_of(count: usize) -> String {
    if count == 1 { "1 file".to_owned() } else { format!("{count} files") }
}
