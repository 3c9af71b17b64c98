//! The file by which processes find a database. A process that can read it can do everything that an owner
//! can (`docs/src/namdb.md`, *the file*).

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crc_fast::{CrcAlgorithm, checksum};
use farpool_pool::JointKeys;
use farpool_txn::DatabaseShape;
use prost::Message;

use crate::error::DatabaseError;

/// The start of each file: the kind of file and its version.
const MAGIC: &[u8; 16] = b"farpool-namdb 8\n";
/// Bytes of the longest file: the keys of the most regions that a database can have.
const MOST_BYTES: u64 = 4 << 20;

/// The description of a database.
#[derive(Clone, PartialEq, Message)]
pub struct DatabaseFile {
    /// How many compute servers it can have at a time.
    #[prost(uint32, tag = "1")]
    slots: u32,
    /// Bytes for the intents in the log of one compute server.
    #[prost(uint64, tag = "2")]
    log_bytes: u64,
    /// The heartbeat timeout: a compute server that is silent for this long is taken for dead.
    #[prost(uint64, tag = "3")]
    patience_ms: u64,
    /// The leases of its regions; the first is the root.
    #[prost(message, optional, tag = "4")]
    keys: Option<JointKeys>,
    /// Parts of its oracle.
    #[prost(uint32, tag = "5")]
    partitions: u32,
    /// The broker of its pool, for more memory.
    #[prost(string, tag = "6")]
    broker: String,
}

impl DatabaseFile {
    pub(crate) fn new(
        shape: DatabaseShape,
        patience: Duration,
        keys: JointKeys,
        broker: String,
    ) -> DatabaseFile {
        DatabaseFile {
            slots: shape.slots.into(),
            partitions: shape.partitions.into(),
            log_bytes: shape.log_bytes,
            patience_ms: patience.as_millis() as u64,
            keys: Some(keys),
            broker,
        }
    }

    pub(crate) fn shape(&self) -> Option<DatabaseShape> {
        let slots = u16::try_from(self.slots).ok()?;
        let partitions = u16::try_from(self.partitions).ok()?;
        let region_bytes = self.keys()?.region_bytes();
        Some(DatabaseShape { slots, partitions, log_bytes: self.log_bytes, region_bytes })
    }

    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms)
    }

    pub(crate) fn keys(&self) -> Option<&JointKeys> {
        self.keys.as_ref()
    }

    pub(crate) fn broker(&self) -> &str {
        &self.broker
    }

    /// Writes the file, readable by its owner only. It appears whole or not at all. A file that exists
    /// already is not replaced.
    pub(crate) fn save(&self, file: &Path) -> Result<(), DatabaseError> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.encode_to_vec());
        bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
        let mut beside = file.as_os_str().to_owned();
        beside.push(format!(".{:016x}", getrandom::u64().unwrap_or_else(|_| std::process::id().into())));
        let beside = PathBuf::from(beside);
        let write = || {
            let mut new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
            new.write_all(&bytes)?;
            new.sync_all()?;
            std::fs::hard_link(&beside, file)
        };
        let written = write();
        let _ = std::fs::remove_file(&beside);
        written.map_err(|reason| DatabaseError::File { file: file.to_owned(), reason })
    }

    /// Reads the file.
    pub(crate) fn load(file: &Path) -> Result<DatabaseFile, DatabaseError> {
        let failed = |reason| DatabaseError::File { file: file.to_owned(), reason };
        let mut bytes = Vec::new();
        File::open(file).and_then(|open| open.take(MOST_BYTES).read_to_end(&mut bytes)).map_err(failed)?;
        Self::decode_all(&bytes).ok_or_else(|| DatabaseError::NotADatabase(file.to_owned()))
    }

    fn decode_all(bytes: &[u8]) -> Option<DatabaseFile> {
        let (body, sum) = bytes.split_last_chunk::<8>()?;
        let message = body.strip_prefix(MAGIC)?;
        let is_whole = u64::from_le_bytes(*sum) == checksum(CrcAlgorithm::Crc64Nvme, body);
        let file = is_whole.then(|| DatabaseFile::decode(message).ok())??;
        file.shape().is_some().then_some(file)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file() -> DatabaseFile {
        let shape = DatabaseShape { slots: 3, partitions: 1, log_bytes: 64, region_bytes: 0 };
        DatabaseFile::new(shape, Duration::from_secs(2), JointKeys::default(), "127.0.0.1:7117".to_owned())
    }

    #[test]
    fn a_file_is_found_again_and_is_for_its_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bank.far");
        file().save(&path).unwrap();
        assert!(file().save(&path).is_err(), "it is not replaced");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        assert_eq!(DatabaseFile::load(&path).unwrap(), file());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        assert!(matches!(DatabaseFile::load(&path), Err(DatabaseError::File { .. })));
        std::fs::write(&path, b"farpool-namdb 8\nnothing").unwrap();
        assert!(DatabaseFile::load(&path).unwrap_err().to_string().contains("not the file of a database"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_database(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(DatabaseFile::decode_all(&bytes), None);
            let all = [&MAGIC[..], &bytes].concat();
            let _ = DatabaseFile::decode_all(&all);
        }
    }
}
