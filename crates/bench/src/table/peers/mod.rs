//! The peers: our own instances of `nbdkit memory`, memcached and redis, with as much data as the footprint.
//! Dropping the value ends them.

mod cache;
pub mod nbd;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::lines::{MEMCACHED_1, MEMCACHED_32, NBDKIT_1, NBDKIT_32, NBDKIT_STREAM, REDIS_1, REDIS_32};
use super::results::Figures;
use cache::{Cache, Protocol};
use nbd::Nbdkit;

/// For servers that have nothing to prepare before they listen.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// What `scripts/setup bench` installs.
const PROGRAMS: [&str; 5] = ["nbdkit", "fio", "memcached", "redis-server", "setpriv"];

/// All peers, running. They are dropped before their folder.
pub struct Peers {
    nbdkit: Nbdkit,
    memcached: Cache,
    redis: Cache,
    _dir: TempDir,
}

impl Peers {
    /// Starts and fills them with `bytes` each.
    pub fn start(bytes: u64, stop: &AtomicBool) -> Result<Self> {
        check_installed(&PROGRAMS, "the peers")?;
        let dir =
            tempfile::Builder::new().prefix("farpool-bench-").tempdir().context("cannot make a folder")?;
        let nbdkit = Nbdkit::start(bytes, stop)?;
        let memcached = Cache::start(Protocol::Memcached, bytes, dir.path(), stop)?;
        let redis = Cache::start(Protocol::Redis, bytes, dir.path(), stop)?;
        Ok(Peers { nbdkit, memcached, redis, _dir: dir })
    }

    /// Measures the peer's line of this id.
    pub fn measure(&self, id: &str, seconds: f64, stop: &AtomicBool) -> Result<Figures> {
        let time = Duration::from_secs_f64(seconds);
        match id {
            NBDKIT_1 => self.nbdkit.read("randread", "8k", 1, seconds, stop),
            NBDKIT_32 => self.nbdkit.read("randread", "8k", 32, seconds, stop),
            NBDKIT_STREAM => self.nbdkit.read("read", "512k", 4, seconds, stop),
            MEMCACHED_1 => self.memcached.gets(1, time, stop),
            MEMCACHED_32 => self.memcached.gets(32, time, stop),
            REDIS_1 => self.redis.gets(1, time, stop),
            REDIS_32 => self.redis.gets(32, time, stop),
            other => bail!("there is no peer {other}"),
        }
    }
}

/// Returns an error that names the programs that are not installed, and how to install them.
pub fn check_installed(programs: &[&str], what: &str) -> Result<()> {
    check(programs, what, is_in_path)
}

fn check(programs: &[&str], what: &str, is_there: impl Fn(&str) -> bool) -> Result<()> {
    let missing: Vec<&str> = programs.iter().copied().filter(|program| !is_there(program)).collect();
    if !missing.is_empty() {
        bail!("{} is missing: run `scripts/setup bench`, which installs {what}", missing.join(", "));
    }
    Ok(())
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).is_file())
}

/// A port of loopback that was free a moment ago.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(listener.local_addr()?)
}

fn listens(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_peers_are_named_with_the_fix() {
        let error = check(&PROGRAMS, "the peers", |program| program != "memcached").unwrap_err().to_string();
        assert!(
            error.starts_with("memcached is missing") && error.contains("scripts/setup bench"),
            "{error}"
        );
        check(&PROGRAMS, "the peers", |_| true).unwrap();
    }

    #[test]
    fn programs_are_looked_up_in_path() {
        assert!(is_in_path("sh") && !is_in_path("no-such-program-anywhere"));
    }
}
