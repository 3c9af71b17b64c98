//! The leases of a cache, recorded in memory, so that another daemon can go on with them.

use std::path::Path;
use std::sync::Arc;

use farpool_keep::{Change, Journal, Kept, MemoryJournal};
use farpool_pool::{Adoption, KeptState, Pool, PoolConfig, PoolError};

use super::HandoverList;

/// A pool for a cache. Nothing else takes memory from it.
pub struct Leases {
    pub(crate) pool: Pool,
    /// `None`: nobody can take the leases over.
    pub(crate) journal: Option<Arc<MemoryJournal>>,
    /// What is to be taken over.
    pub(crate) adopted: Option<(Adoption, HandoverList)>,
}

impl From<Pool> for Leases {
    /// Leases that nobody can take over.
    fn from(pool: Pool) -> Leases {
        Leases { pool, journal: None, adopted: None }
    }
}

impl Leases {
    /// Connects to the broker.
    ///
    /// # Errors
    /// As [`Pool::connect`].
    pub fn connect(config: PoolConfig) -> Result<Leases, PoolError> {
        let (pool, journal, nothing) = connect(config, &Kept::default())?;
        pool.stock().finish_adoption(nothing);
        Ok(Leases { pool, journal: Some(journal), adopted: None })
    }

    /// Goes on with the leases of another daemon, as far as they still run.
    ///
    /// # Errors
    /// As [`Pool::connect_keeping`].
    pub fn take_over(config: PoolConfig, list: HandoverList) -> Result<Leases, PoolError> {
        let (pool, journal, adoption) = connect(config, &list.leases)?;
        Ok(Leases { pool, journal: Some(journal), adopted: Some((adoption, list)) })
    }
}

fn connect(config: PoolConfig, kept: &Kept) -> Result<(Pool, Arc<MemoryJournal>, Adoption), PoolError> {
    let journal = Arc::new(MemoryJournal::default());
    let known = kept.under(&[]).map(|(key, value)| Change::Put { key: key.into(), value: value.into() });
    journal.append(&known.collect::<Vec<_>>());
    // The directory would be named in errors of an overflow directory: a cache has none.
    let state = KeptState { journal: journal.clone(), kept, dir: Path::new("") };
    let (pool, adoption) = Pool::connect_keeping(config, None, state)?;
    Ok((pool, journal, adoption))
}
