//! `farpool mount --keep DIR`: files that survive a restart of the daemon.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use farpool_file::{FileStore, KEPT_WORDS_BYTES};
use farpool_keep::{Found, KeepDir, Kept};
use farpool_mount::{KeptMount, kept_files};
use farpool_pool::{KeptState, OverflowConfig, Pool, PoolConfig};

use crate::output::say;
use crate::size::ByteSize;

/// How long after a clean end the files can be found again: the time of a lease, less what a new daemon takes
/// to start.
const RESTART_WITHIN_S: u64 = 8;

/// The directory of a mount's state, and the state found in it.
pub struct Keeping {
    path: PathBuf,
    dir: KeepDir,
    kept: Kept,
}

impl Keeping {
    /// Takes the directory, and reads its state. State from an earlier boot is reported, and discarded.
    pub fn open(path: &Path) -> Result<Self> {
        let (dir, found) = KeepDir::open(path, KEPT_WORDS_BYTES)?;
        let kept = match found {
            Found::State(kept) => kept,
            Found::Nothing => Kept::default(),
            Found::EarlierBoot => {
                say(format!(
                    "empty  {} is from before this host's last boot: its files are lost",
                    path.display()
                ));
                Kept::default()
            }
        };
        Ok(Keeping { path: path.to_owned(), dir, kept })
    }

    /// The store with the files that were found. Data whose leases have ended are lost.
    pub fn store(
        &mut self,
        config: PoolConfig,
        overflow: Option<&OverflowConfig>,
    ) -> Result<(FileStore, KeptMount)> {
        let kept = std::mem::take(&mut self.kept);
        let journal = self.dir.journal();
        let state = KeptState { journal: journal.clone(), kept: &kept, dir: &self.path };
        let (pool, adoption) = Pool::connect_keeping(config, overflow, state)?;
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
                    "lost   {lost} in {}: their leases, nodes or overflow files are gone; reading the lost part gives EIO",
                    files_of(losses.len())
                ));
            }
        }
        let kept = KeptMount::new(journal, kept, store.clone(), files);
        Ok((store, kept))
    }

    /// Prints how to find the files again, now that the mount has ended.
    pub fn say_goodbye(&self) {
        if self.dir.journal().is_whole() {
            say(format!(
                "kept   for about {RESTART_WITHIN_S} s: mount again with --keep {} to find the files again",
                self.path.display()
            ));
        }
    }
}

fn files_of(count: usize) -> String {
    if count == 1 { "1 file".to_owned() } else { format!("{count} files") }
}
