//! A connection to the pool, the names of its files, and its sessions.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;
use std::sync::Arc;

use farpool_control::{Located, locate};
use farpool_fabric::TransportChoice;
use farpool_file::{FarFile, FileStore, Session};
use farpool_pool::{Pool, PoolConfig};
use rustix_futex_sync::Mutex;

use crate::error::Failure;
use crate::file::OpenFile;
use crate::workers::Workers;

/// Longest name of a file, as in other file systems.
const MAX_NAME_BYTES: usize = 255;

/// The object behind a handle of type `farpool`.
pub struct Connection {
    workers: Workers,
    files: Arc<Files>,
}

/// The address of a pool, and how to use it.
pub(crate) struct Target<'a> {
    pub(crate) broker: Option<&'a str>,
    pub(crate) tls_dir: Option<&'a str>,
    pub(crate) transport: Option<&'a str>,
    pub(crate) limit_bytes: u64,
}

/// The files of a connection.
pub(crate) struct Files {
    store: FileStore,
    names: Mutex<HashMap<String, FarFile>>,
    /// Sessions that no thread uses now: at most as many as were ever in use at the same time.
    idle: Mutex<Vec<Session>>,
}

impl Connection {
    pub(crate) fn open(target: &Target<'_>) -> Result<Self, Failure> {
        let located = locate(target.broker, target.tls_dir.map(Path::new))?;
        let Located { address: broker, tls } = located.ok_or_else(|| {
            Failure::invalid(
                "no broker: start one with `farpool up`, or set options.broker or FARPOOL_BROKER to \
                 HOST:PORT",
            )
        })?;
        let transport = match target.transport.unwrap_or("auto") {
            "verbs" => {
                return Err(Failure::invalid("the C library does not support RDMA: choose auto, shm or tcp"));
            }
            name => name.parse::<TransportChoice>().map_err(Failure::invalid)?,
        };
        let limit_bytes = Some(target.limit_bytes).filter(|&bytes| bytes > 0);
        let pool = Pool::connect(PoolConfig { broker, tls, transport: transport.into(), limit_bytes })?;
        let files =
            Arc::new(Files { store: FileStore::new(pool)?, names: Mutex::default(), idle: Mutex::default() });
        Ok(Connection { workers: Workers::start()?, files })
    }

    /// Creates a file, leases all of its memory, and opens it.
    pub(crate) fn create(&self, name: &str, size: u64) -> Result<OpenFile, Failure> {
        check_name(name)?;
        let exists = || Failure::new(libc::EEXIST, format!("the file '{name}' exists already"));
        if self.files.names.lock().contains_key(name) {
            return Err(exists());
        }
        let file = self.files.store.create();
        self.files.with_session(|session| {
            file.set_size(session, size)?;
            file.reserve(session, 0, size)
        })?;
        match self.files.names.lock().entry(name.to_owned()) {
            Entry::Occupied(_) => return Err(exists()), // another thread was faster
            Entry::Vacant(place) => place.insert(file.clone()),
        };
        Ok(self.opened(file))
    }

    pub(crate) fn find(&self, name: &str) -> Result<OpenFile, Failure> {
        let file = self.files.names.lock().get(name).cloned();
        Ok(self.opened(file.ok_or_else(|| no_such_file(name))?))
    }

    pub(crate) fn delete(&self, name: &str) -> Result<(), Failure> {
        let removed = self.files.names.lock().remove(name);
        removed.map(drop).ok_or_else(|| no_such_file(name))
    }

    /// Waits until all accepted operations are done.
    pub(crate) fn finish(&self) {
        self.workers.finish();
    }

    fn opened(&self, file: FarFile) -> OpenFile {
        OpenFile::new(file, self.files.clone(), self.workers.queue())
    }
}

impl Files {
    /// Runs `body` with a session that no other thread uses meanwhile.
    pub(crate) fn with_session<R>(&self, body: impl FnOnce(&Session) -> R) -> R {
        let idle = self.idle.lock().pop();
        let session = idle.unwrap_or_else(|| self.store.session());
        let result = body(&session);
        self.idle.lock().push(session);
        result
    }
}

fn check_name(name: &str) -> Result<(), Failure> {
    match name.len() {
        0 => Err(Failure::invalid("a file needs a name")),
        length if length > MAX_NAME_BYTES => {
            Err(Failure::new(libc::ENAMETOOLONG, format!("a name has at most {MAX_NAME_BYTES} bytes")))
        }
        _ => Ok(()),
    }
}

fn no_such_file(name: &str) -> Failure {
    Failure::new(libc::ENOENT, format!("this connection has no file '{name}'"))
}
