//! A PostgreSQL server of our own: throwaway data directory, no TCP port, ended with us.
//!
//! It listens on a Unix socket only, inside a directory that only its user may enter. So it takes no port that
//! somebody else has, and `trust` authentication lets nobody in who could not read the data anyway.
//! Run as root, the server becomes an unprivileged user, since PostgreSQL insists.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use postgres::error::DbError;
use postgres::{Client, Config, NoTls};
use rustix::process::Signal;

use crate::cgroup::MemoryLimit;
use crate::child::{ChildProcess, Launch, run, run_as};
use crate::machine::{User, is_root};
use crate::stop::StopFlag;

/// Where Debian and Ubuntu keep the server's programs, a folder per version.
const DEBIAN_ROOT: &str = "/usr/lib/postgresql";
/// initdb writes some 40 MiB.
const INITDB_DEADLINE: Duration = Duration::from_secs(120);
/// A new cluster starts within a second; a busy machine takes longer.
const START_DEADLINE: Duration = Duration::from_secs(60);
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// Our superuser, whatever the system's user is called.
const ROLE: &str = "postgres";
/// Only names the socket: nothing listens on it.
const PORT: u16 = 5432;
/// `sun_path` of a Unix socket holds 108 bytes including the final zero (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Settings of every server here, and why.
const SETTINGS: [(&str, &str); 9] = [
    ("listen_addresses", ""),                           // see the module's head
    ("shared_preload_libraries", "pg_stat_statements"), // counts the temporary bytes that a statement writes
    ("wal_level", "minimal"),                           // loading into a new table writes no log
    ("max_wal_senders", "0"),                           // what `minimal` asks for
    ("max_wal_size", "4GB"),                            // no checkpoint in the middle of a query
    ("autovacuum", "off"),                              // no work that comes and goes between runs
    ("jit", "off"),                                     // compiling takes a share of small runs
    ("max_parallel_workers_per_gather", "0"),           // one process spills, as one number is compared
    ("log_temp_files", "0"),                            // tells the client where each temporary file was
];

/// The folder with `initdb` and `postgres`.
#[derive(Clone, Debug)]
pub struct Programs(PathBuf);

impl Programs {
    /// Looks where `pg_config` says, then where Debian keeps them, newest version first.
    pub fn find() -> Result<Self> {
        let told = run("pg_config", &["--bindir".as_ref()], CONNECT_DEADLINE).ok();
        let told = told.map(|line| PathBuf::from(line.trim()));
        let mut versions: BTreeSet<(u32, PathBuf)> = BTreeSet::new();
        for entry in fs::read_dir(DEBIAN_ROOT).into_iter().flatten().flatten() {
            let version = entry.file_name().to_string_lossy().parse().unwrap_or(0);
            versions.insert((version, entry.path().join("bin")));
        }
        let kept = versions.into_iter().rev().map(|(_, dir)| dir);
        told.into_iter()
            .chain(kept)
            .find(|dir| dir.join("initdb").exists() && dir.join("postgres").exists())
            .map(Self)
            .context("no PostgreSQL server found: run scripts/setup, or apt-get install postgresql")
    }
}

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct ServerOptions<'a> {
    /// An empty folder for the data directory and the socket; other users must be able to reach it.
    pub dir: &'a Path,
    /// Where its log goes.
    pub log: &'a Path,
    /// The memory limit it lives under.
    pub limit: Option<&'a MemoryLimit>,
}

/// A running server; ended when dropped.
#[derive(Debug)]
pub struct Server {
    process: ChildProcess,
    sockets: PathBuf,
    user: Option<User>,
}

impl Server {
    /// Makes a cluster and starts it.
    pub fn start(options: &ServerOptions<'_>, stop: &StopFlag) -> Result<Self> {
        let programs = Programs::find()?;
        let user = if is_root() { Some(User::first_of(&["postgres", "nobody"])?) } else { None };
        let (data, sockets) = (options.dir.join("data"), options.dir.join("socket"));
        make_private(&data, user.as_ref())?;
        make_private(&sockets, user.as_ref())?;
        if sockets.as_os_str().len() + "/.s.PGSQL.5432.lock".len() > SOCKET_PATH_MAX {
            bail!("the path {} is too long for a socket: choose a shorter --work-dir", sockets.display());
        }
        let fixed = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username", ROLE, "-D"];
        let mut args: Vec<&OsStr> = fixed.iter().map(OsStr::new).collect();
        args.push(data.as_ref());
        run_as(user.as_ref(), &programs.0.join("initdb"), &args, INITDB_DEADLINE)?;

        let launch = Launch {
            name: "PostgreSQL",
            program: &programs.0.join("postgres"),
            args: server_args(&data, &sockets),
            user: user.as_ref(),
            group_file: options.limit.map(MemoryLimit::procs_file),
            stop_signal: Signal::INT, // fast shutdown: rolls back, lets nobody wait
        };
        let process = ChildProcess::spawn(&launch, options.log)?;
        let mut server = Self { process, sockets: sockets.clone(), user };
        let config = server.config();
        server.process.wait_until(START_DEADLINE, stop, |_| config.connect(NoTls).is_ok())?;
        Ok(server)
    }

    fn config(&self) -> Config {
        let mut config = Config::new();
        config.host_path(&self.sockets).port(PORT).user(ROLE).dbname("postgres");
        config.connect_timeout(CONNECT_DEADLINE).application_name("farpool demo");
        config
    }

    /// A connection as superuser.
    pub fn connect(&self) -> Result<Client> {
        self.connect_with(|_| ())
    }

    /// A connection whose notices and log lines go to `on_notice`.
    pub fn connect_with(&self, on_notice: impl Fn(DbError) + Send + Sync + 'static) -> Result<Client> {
        let mut config = self.config();
        config.notice_callback(on_notice);
        config.connect(NoTls).context("cannot connect to PostgreSQL")
    }

    /// The version it reports, as `15.14`.
    pub fn version(&self) -> Result<String> {
        let row =
            self.connect()?.query_one("SELECT split_part(current_setting('server_version'), ' ', 1)", &[])?;
        Ok(row.get(0))
    }

    /// Makes a tablespace `name` in the new folder `dir`, which the server will own.
    pub fn create_tablespace(&self, name: &str, dir: &Path) -> Result<()> {
        make_private(dir, self.user.as_ref())?;
        let location = dir.to_str().with_context(|| format!("{} is not UTF-8", dir.display()))?;
        let statement = format!("CREATE TABLESPACE {name} LOCATION '{}'", location.replace('\'', "''"));
        self.connect()?
            .batch_execute(&statement)
            .with_context(|| format!("cannot make a tablespace in {location}"))
    }

    /// Whether it runs as another user than we do, who must then be let into what we mount.
    pub fn is_other_user() -> bool {
        is_root()
    }

    /// The process id of the postmaster.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// An error, with the log's last lines, if the server has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        if !self.process.is_running()? {
            bail!("PostgreSQL has ended: {}", self.process.last_words());
        }
        Ok(())
    }

    /// Fast shutdown.
    pub fn stop(&mut self) -> Result<()> {
        self.process.end()
    }
}

fn server_args(data: &Path, sockets: &Path) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["-D".into(), data.into(), "-k".into(), sockets.into()];
    args.extend(["-p".into(), PORT.to_string().into()]);
    for (name, value) in SETTINGS {
        args.extend(["-c".into(), format!("{name}={value}").into()]);
    }
    args
}

/// A new folder that only the server's user may enter.
fn make_private(dir: &Path, user: Option<&User>) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("cannot make {}", dir.display()))?;
    user.map_or(Ok(()), |user| user.own(dir))
}
