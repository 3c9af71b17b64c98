//! The nodes that the broker knew, in one `redb` file: the last report of each, without what was lent.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use farpool_control::own;
use farpool_wire::NodeId;
use farpool_wire::control::RegisterRequest;
use prost::Message;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, TableError};

/// Version of the tables below; a file of another version is not touched.
const FORMAT: u64 = 1;
const META: TableDefinition<&str, u64> = TableDefinition::new("farpool.meta");
const FORMAT_KEY: &str = "format";
/// From a node's id to its last report: a [`RegisterRequest`] without what was lent.
const NODES: TableDefinition<u64, &[u8]> = TableDefinition::new("farpool.nodes");

/// Memory for the file's pages: enough for a thousand reports. The broker has everything in memory anyway.
const CACHE_BYTES: usize = 4 << 20;

/// Why the store cannot be used. Deleting it loses nothing: the nodes register again.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// End the other broker, or take another file.
    #[error("{} is in use by another broker: end it, or pass another --store", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// Name another file, or move a damaged store away.
    #[error(
        "{} is not a broker's store, or a damaged one ({reason}): name another file with --store, or, if it \
         was this broker's store, move it away and start again; the nodes register again",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// Run the newer release, or move the file away.
    #[error(
        "{} was written by another release (format {found}, this one reads {FORMAT}): run that release, or \
         move the file away; the nodes register again",
        path.display()
    )]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// Fix the directory, its permissions or the disk.
    #[error("cannot use {}: {source}; pass a writable file with --store", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// An open store. Its methods block on the disk.
pub struct Store {
    /// `None` only while the store is being dropped.
    database: Option<Database>,
    path: PathBuf,
}

impl Drop for Store {
    fn drop(&mut self) {
        // Closing writes to the file. That may fail on a damaged file; the next opening detects the damage.
        let database = self.database.take();
        let _ = contained(&self.path, || {
            drop(database);
            Ok(())
        });
    }
}

impl Store {
    /// Opens the file, or makes a new one. Only its owner can open it: another user could otherwise lock it,
    /// and then no broker would start again.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let unusable = |source| StoreError::Io { path: path.to_owned(), source };
        let file = own::open_file(path).map_err(unusable)?;
        let private = file.try_clone().map_err(unusable)?;
        contained(path, || {
            let mut builder = Database::builder();
            builder.set_cache_size(CACHE_BYTES);
            let database = builder.create_file(file).map_err(|error| match error {
                DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.to_owned() },
                other => failure(path, other.into()),
            })?;
            let store = Store { database: Some(database), path: path.to_owned() };
            store.claim_format()?;
            own::keep_private(&private).map_err(unusable)?;
            Ok(store)
        })
    }

    /// Every node's last report.
    pub fn reports(&self) -> Result<Vec<RegisterRequest>, StoreError> {
        let records = self.contained(|| self.try_records())?;
        let decoded = records.iter().map(|record| RegisterRequest::decode(record.as_slice()));
        decoded.collect::<Result<_, _>>().map_err(|error| self.damaged(error.to_string()))
    }

    /// Replaces a node's report. An unchanged report is not written: nodes report often.
    pub fn remember(&self, node: NodeId, report: &RegisterRequest) -> Result<(), StoreError> {
        let record = report.encode_to_vec();
        self.contained(|| {
            if self.try_has(node, &record)? { Ok(()) } else { self.try_change(node, Some(&record)) }
        })
    }

    /// Drops a node's report.
    pub fn forget(&self, node: NodeId) -> Result<(), StoreError> {
        self.contained(|| self.try_change(node, None))
    }

    /// Checks that the file is a store of this format; makes it one if it is empty.
    fn claim_format(&self) -> Result<(), StoreError> {
        match self.try_format().map_err(|error| failure(&self.path, error))? {
            Some(FORMAT) => Ok(()),
            Some(found) => Err(StoreError::OtherFormat { path: self.path.clone(), found }),
            None => Err(self.damaged("it holds other data".to_owned())),
        }
    }

    fn try_format(&self) -> Result<Option<u64>, redb::Error> {
        let write = self.database()?.begin_write()?;
        if write.list_tables()?.next().is_none() {
            write.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
            write.open_table(NODES)?;
            write.commit()?;
            return Ok(Some(FORMAT));
        }
        match self.database()?.begin_read()?.open_table(META) {
            Ok(meta) => Ok(meta.get(FORMAT_KEY)?.map(|format| format.value())),
            Err(TableError::Storage(error)) => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    fn try_records(&self) -> Result<Vec<Vec<u8>>, redb::Error> {
        let nodes = self.database()?.begin_read()?.open_table(NODES)?;
        nodes.iter()?.map(|entry| Ok(entry?.1.value().to_vec())).collect()
    }

    fn try_has(&self, node: NodeId, record: &[u8]) -> Result<bool, redb::Error> {
        let nodes = self.database()?.begin_read()?.open_table(NODES)?;
        Ok(nodes.get(node.0)?.is_some_and(|kept| kept.value() == record))
    }

    fn try_change(&self, node: NodeId, record: Option<&[u8]>) -> Result<(), redb::Error> {
        let write = self.database()?.begin_write()?;
        {
            let mut nodes = write.open_table(NODES)?;
            match record {
                Some(record) => nodes.insert(node.0, record)?,
                None => nodes.remove(node.0)?,
            };
        }
        Ok(write.commit()?)
    }

    fn database(&self) -> Result<&Database, redb::Error> {
        self.database.as_ref().ok_or(redb::Error::DatabaseClosed)
    }

    fn contained<T>(&self, body: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, StoreError> {
        contained(&self.path, || body().map_err(|error| failure(&self.path, error)))
    }

    fn damaged(&self, reason: String) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), reason }
    }
}

/// redb reports some damage by panicking. The broker can do without the store, so a panic becomes an error.
fn contained<T>(path: &Path, body: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
    // Unwind safety: after a panic, only redb's own handle is used again, and it poisons itself.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        let reason = "its pages are inconsistent".to_owned();
        Err(StoreError::Damaged { path: path.to_owned(), reason })
    })
}

fn failure(path: &Path, error: redb::Error) -> StoreError {
    match error {
        // With `InvalidData` and `UnexpectedEof`, redb says that a file is not one of its own.
        redb::Error::Io(source)
            if !matches!(source.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) =>
        {
            StoreError::Io { path: path.to_owned(), source }
        }
        redb::Error::UpgradeRequired(found) => {
            StoreError::OtherFormat { path: path.to_owned(), found: u64::from(found) }
        }
        other => StoreError::Damaged { path: path.to_owned(), reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::control::NodeAddress;
    use proptest::prelude::*;

    use super::*;

    fn report(node: u64, regions_total: u32) -> RegisterRequest {
        let address = NodeAddress { node, control: "127.0.0.1:1".to_owned(), ..Default::default() };
        RegisterRequest { address: Some(address), region_bytes: 64, regions_total, lent: Vec::new() }
    }

    fn a_store_file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("broker.redb");
        let store = Store::open(&path).unwrap();
        for node in 0..3 {
            store.remember(NodeId(node), &report(node, 8)).unwrap();
        }
        (dir, path)
    }

    #[test]
    fn after_reopening_remembered_nodes_are_there_and_forgotten_ones_are_not() {
        let (_dir, path) = a_store_file();
        let store = Store::open(&path).unwrap();
        store.remember(NodeId(1), &report(1, 9)).unwrap();
        store.forget(NodeId(2)).unwrap();
        drop(store);
        assert_eq!(Store::open(&path).unwrap().reports().unwrap(), [report(0, 8), report(1, 9)]);
    }

    #[test]
    fn other_users_cannot_open_a_store_and_a_folder_that_they_can_change_is_refused() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let (dir, path) = a_store_file();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap()
        };
        let mode = || std::fs::metadata(&path).unwrap().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        set(&path, 0o644); // as an earlier release made it
        drop(Store::open(&path).unwrap());
        assert_eq!(mode(), 0o600);
        set(dir.path(), 0o777);
        let text = Store::open(&path).err().unwrap().to_string();
        assert!(text.contains("chmod go-w") && text.contains("--store"), "{text}");
    }

    #[test]
    fn a_store_directly_in_a_folder_such_as_tmp_is_found_again_and_one_that_others_can_open_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let (dir, path) = a_store_file();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap()
        };
        set(dir.path(), 0o1777);
        assert_eq!(Store::open(&path).unwrap().reports().unwrap().len(), 3);
        set(&path, 0o666);
        let text = Store::open(&path).err().unwrap().to_string();
        assert!(text.contains("chmod 600") && text.contains("--store"), "{text}");
    }

    #[test]
    fn a_store_in_use_names_the_other_broker() {
        let (_dir, path) = a_store_file();
        let _first = Store::open(&path).unwrap();
        assert!(matches!(Store::open(&path), Err(StoreError::InUse { .. })));
    }

    #[test]
    fn a_store_of_a_newer_format_is_an_error_that_names_file_and_fix() {
        let (_dir, path) = a_store_file();
        let database = Database::create(&path).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(META).unwrap().insert(FORMAT_KEY, FORMAT + 1).unwrap();
        write.commit().unwrap();
        drop(database);
        let error = Store::open(&path).err().unwrap();
        assert!(matches!(error, StoreError::OtherFormat { found: 2, .. }));
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()) && text.contains("move the file away"), "{text}");
    }

    #[test]
    fn a_file_that_is_not_a_store_is_an_error_that_names_file_and_fix() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        std::fs::write(&path, "Dear diary, ".repeat(1_000)).unwrap();
        let text = Store::open(&path).err().unwrap().to_string();
        assert!(text.contains(path.to_str().unwrap()) && text.contains("move it away"), "{text}");
        assert!(text.contains("another file with --store"), "{text}");
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("Dear diary"));
    }

    #[test]
    fn a_damaged_record_is_an_error() {
        let (_dir, path) = a_store_file();
        let store = Store::open(&path).unwrap();
        store.try_change(NodeId(1), Some(&[0xFF; 9])).unwrap();
        assert!(matches!(store.reports(), Err(StoreError::Damaged { .. })));
    }

    #[test]
    fn a_missing_directory_is_an_error_that_names_the_flag() {
        let text = Store::open(Path::new("/nonexistent/broker.redb")).err().unwrap().to_string();
        assert!(text.contains("--store"), "{text}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn a_damaged_file_is_an_error_or_a_store_never_a_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
            keep in any::<prop::sample::Index>(),
            truncate: bool,
        ) {
            let (_dir, path) = a_store_file();
            let mut bytes = std::fs::read(&path).unwrap();
            // Most of the file is empty pages, so only bytes that are not zero are damaged.
            let used: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
            for (at, byte) in edits {
                bytes[*at.get(&used)] = byte;
            }
            if truncate {
                bytes.truncate(keep.index(bytes.len()));
            }
            std::fs::write(&path, bytes).unwrap();
            if let Ok(store) = Store::open(&path) {
                let _ = store.reports();
                let _ = store.remember(NodeId(9), &report(9, 8));
            }
        }
    }
}
