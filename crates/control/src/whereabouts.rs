//! Finds the user's pool when a program is not given its address.
//!
//! W1. What the caller passes comes first, then the environment (`FARPOOL_BROKER`, `FARPOOL_TLS_DIR`), then
//!     what this user's `farpool up` has published in its run directory. The certificates published there are
//!     used only for the broker published there.
//! W2. A run directory that belongs to another user, or that other users may write to, is an error: they
//!     could choose our broker and our certificates.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;

use crate::{ControlError, Tls, check_address};

/// File in the run directory with the broker's address. It exists once the pool is ready.
pub const BROKER_ADDRESS: &str = "broker.addr";
/// Folder in the run directory with the pool's certificates.
pub const TLS_FOLDER: &str = "tls";

/// The environment variable that names the broker, `HOST:PORT`.
const BROKER_VARIABLE: &str = "FARPOOL_BROKER";
/// The environment variable that names the folder with the pool's certificates.
const TLS_VARIABLE: &str = "FARPOOL_TLS_DIR";

/// A broker, and the certificates for it.
#[derive(Clone, Debug)]
pub struct Located {
    /// Its `host:port`.
    pub address: String,
    /// The pool's certificates; `None` for plain text.
    pub tls: Option<Tls>,
}

/// Finds the broker by the arguments, the environment, and this user's `farpool up` (W1). `None` if none of
/// them names a broker.
///
/// # Errors
/// When certificates cannot be read, or the run directory is not this user's own.
pub fn locate(broker: Option<&str>, tls_dir: Option<&Path>) -> Result<Option<Located>, ControlError> {
    let variable = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    let said = Said {
        // An address that is not UTF-8 fails later, with an error that shows it.
        broker: broker
            .map(str::to_owned)
            .or_else(|| Some(variable(BROKER_VARIABLE)?.to_string_lossy().into_owned())),
        tls_dir: tls_dir.map(Path::to_owned).or_else(|| variable(TLS_VARIABLE).map(PathBuf::from)),
    };
    said.complete(&default_run_dir())
}

/// What the caller and the environment specify.
struct Said {
    broker: Option<String>,
    tls_dir: Option<PathBuf>,
}

impl Said {
    fn complete(self, run_dir: &Path) -> Result<Option<Located>, ControlError> {
        let published = match (&self.broker, &self.tls_dir) {
            (Some(_), Some(_)) => None, // nothing is missing
            _ => published_broker(run_dir)?,
        };
        if let (None, Some(address)) = (&self.broker, &published)
            && check_address(address).is_err()
        {
            let fix = "end the pool, and start it again with `farpool up`";
            let reason = format!("its file {BROKER_ADDRESS} holds no address; {fix}");
            return Err(unusable(run_dir, reason));
        }
        let Some(address) = self.broker.or_else(|| published.clone()) else { return Ok(None) };
        let own_tls = (published.as_ref() == Some(&address)).then(|| run_dir.join(TLS_FOLDER));
        let tls = self.tls_dir.or(own_tls).map(|folder| Tls::load(&folder)).transpose()?;
        Ok(Some(Located { address, tls }))
    }
}

/// The run directory of a user's pool unless `farpool up --dir` names another one.
pub fn default_run_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| Path::new(folder).is_absolute()) {
        Some(folder) => Path::new(&folder).join("farpool"),
        None => PathBuf::from(format!("/tmp/farpool-{}", geteuid().as_raw())),
    }
}

/// The broker of the pool that runs in this directory; `None` when there is none.
///
/// # Errors
/// As [`open_run_dir`], and when the address cannot be read.
pub fn published_broker(run_dir: &Path) -> Result<Option<String>, ControlError> {
    if !run_dir.exists() {
        return Ok(None);
    }
    // Checked first: a folder of another user may hold anything, such as a pipe that never answers.
    open_run_dir(run_dir).map_err(advise)?;
    match fs::read_to_string(run_dir.join(BROKER_ADDRESS)) {
        Ok(address) => Ok(Some(address.trim().to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(run_dir, format!("cannot read {BROKER_ADDRESS}: {error}"))),
    }
}

/// Adds what a program can do that looks for a pool in an unusable folder.
fn advise(error: ControlError) -> ControlError {
    match error {
        ControlError::RunDir { path, reason } => {
            let fix = "name the broker and its certificates: --broker and --tls-dir";
            let reason = format!("{reason}; {fix}, or {BROKER_VARIABLE} and {TLS_VARIABLE}");
            ControlError::RunDir { path, reason }
        }
        other => other,
    }
}

/// Opens a folder and checks that only this user can have put files there (W2).
///
/// # Errors
/// When other users can have put files there, or when it cannot be opened. The caller adds the fix. That is
/// never `chmod`: the folder may be one that all users share, such as `/tmp`.
pub fn open_run_dir(path: &Path) -> Result<File, ControlError> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
    let looked = opened.and_then(|folder| folder.metadata().map(|metadata| (folder, metadata)));
    let (folder, metadata) = looked.map_err(|error: io::Error| unusable(path, error.to_string()))?;
    if metadata.uid() != geteuid().as_raw() {
        return Err(unusable(path, format!("it belongs to user {}", metadata.uid())));
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(unusable(path, "other users may write to it".to_owned()));
    }
    Ok(folder)
}

fn unusable(path: &Path, reason: String) -> ControlError {
    ControlError::RunDir { path: path.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const BROKER: &str = "127.0.0.1:7117";

    /// A run directory as `farpool up` leaves it, with files that stand for certificates.
    fn run_dir() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(BROKER_ADDRESS), format!("{BROKER}\n")).unwrap();
        let tls = folder.path().join(TLS_FOLDER);
        fs::create_dir(&tls).unwrap();
        for name in ["ca.pem", "cert.pem", "key.pem"] {
            fs::write(tls.join(name), "").unwrap();
        }
        folder
    }

    fn said(broker: Option<&str>, tls_dir: Option<&Path>) -> Said {
        Said { broker: broker.map(str::to_owned), tls_dir: tls_dir.map(Path::to_owned) }
    }

    #[test]
    fn pool_that_was_not_named_is_the_published_one_with_its_certificates() {
        let folder = run_dir();
        for broker in [None, Some(BROKER)] {
            let found = said(broker, None).complete(folder.path()).unwrap().unwrap();
            assert_eq!(found.address, BROKER);
            assert!(found.tls.is_some());
        }
    }

    #[test]
    fn the_published_certificates_are_not_used_for_another_broker() {
        let folder = run_dir();
        let found = said(Some("127.0.0.1:9"), None).complete(folder.path()).unwrap().unwrap();
        assert_eq!(found.address, "127.0.0.1:9");
        assert!(found.tls.is_none());
        let tls = folder.path().join(TLS_FOLDER);
        assert!(
            said(Some("127.0.0.1:9"), Some(&tls)).complete(folder.path()).unwrap().unwrap().tls.is_some()
        );
    }

    #[test]
    fn without_a_pool_nothing_is_found() {
        let folder = tempfile::tempdir().unwrap();
        assert!(said(None, None).complete(folder.path()).unwrap().is_none());
        assert!(said(None, None).complete(&folder.path().join("missing")).unwrap().is_none());
    }

    #[test]
    fn a_damaged_address_is_an_error_that_names_its_file_and_the_fix() {
        let folder = run_dir();
        for damaged in ["", "garbage", "127.0.0.1:0"] {
            fs::write(folder.path().join(BROKER_ADDRESS), damaged).unwrap();
            let error = said(None, None).complete(folder.path()).unwrap_err().to_string();
            assert!(error.contains(BROKER_ADDRESS) && error.contains("farpool up"), "{error}");
            assert!(error.contains(folder.path().to_str().unwrap()), "{error}");
            assert!(said(Some(BROKER), None).complete(folder.path()).unwrap().is_some());
        }
    }

    #[test]
    fn run_directory_that_others_may_write_to_or_that_is_a_link_is_refused_with_the_fix() {
        let folder = run_dir();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = said(None, None).complete(folder.path()).unwrap_err().to_string();
        assert!(error.contains(TLS_VARIABLE) && !error.contains("chmod"), "{error}");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let parent = tempfile::tempdir().unwrap();
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(said(None, None).complete(&link).is_err());
        // If the caller names both broker and certificates, the run directory is not needed.
        let tls = folder.path().join(TLS_FOLDER);
        assert!(said(Some(BROKER), Some(&tls)).complete(&link).unwrap().is_some());
    }
}
