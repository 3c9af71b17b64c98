//! Files without the thread that moves and rebuilds them, so that nothing changes them beside a test.

use std::sync::Arc;

use farpool_pool::{Extent, SessionCore};

use super::*;
use crate::{FileCore, StoreCore};

/// A store without a mover, its pool, and a session.
pub(super) struct Bare {
    pub(super) store: Arc<StoreCore>,
    session: Session,
    pool: Pool,
}

impl Bare {
    pub(super) fn new(rig: &Rig) -> Bare {
        Bare::over(rig, TransportChoice::Shm)
    }

    pub(super) fn over(rig: &Rig, transport: TransportChoice) -> Bare {
        Bare::of(rig.pool(transport))
    }

    pub(super) fn of(pool: Pool) -> Bare {
        let store = Arc::new(StoreCore::new(pool.stock().clone()).unwrap());
        Bare { store, session: pool.session(), pool }
    }

    /// Runs what needs the session's core.
    pub(super) fn run<T>(&self, task: impl AsyncFnOnce(&SessionCore) -> T) -> T {
        let guard = self.session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        guard.block_on(task(core))
    }

    /// A file with these bytes.
    pub(super) fn filled(&self, redundancy: Redundancy, bytes: &[u8]) -> Arc<FileCore> {
        let file = self.store.create_as(redundancy);
        self.run(async |core| file.write(core, 0, bytes).await).unwrap();
        file
    }

    pub(super) fn read(&self, file: &FileCore, offset: u64, length: usize) -> Result<Vec<u8>, FileError> {
        self.run(async |core| {
            let (buffer, within) = file.read(core, offset, length).await?;
            Ok(buffer.map_or(vec![0; within.len()], |buffer| buffer[within].to_vec()))
        })
    }

    /// Puts a block's bytes into far memory without changing its word.
    pub(super) fn put(&self, extent: &Extent, block: u64, bytes: &[u8; BLOCK_BYTES]) {
        self.run(async |core| {
            let mut buffer = core.buffer(BLOCK_BYTES).unwrap();
            buffer.copy_from_slice(bytes);
            core.write(extent, block * BLOCK, buffer).await.1.unwrap();
        });
    }

    /// Has all regions taken back, with a long grace, and waits until the store knows.
    pub(super) fn lose_all_regions(&self, rig: &Rig) {
        wait_until(|| {
            rig.take_back_from(self.pool.owner(), 64, Duration::from_secs(600));
            self.pool.stock().regions().iter().all(|region| region.is_leaving())
        });
    }
}
