//! A PostgreSQL server of our own: a throwaway data directory, no TCP port, and it ends with us.
//!
//! It listens only on a Unix socket, inside a directory that only its user may enter. So it takes no port
//! from another server, and `trust` authentication opens nothing that the directory does not open already.
//! PostgreSQL refuses to run as root. For root, the server therefore runs as an unprivileged user.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farpool_fabric::MAX_SOCKET_PATH_BYTES;
use postgres::error::DbError;
use postgres::{Client, Config, NoTls};
use rustix::process::Signal;

use crate::cgroup::MemoryLimit;
use crate::child::{Child, Launch, run, run_as};
use crate::machine::{User, is_root};
use crate::stop::StopFlag;

/// Where Debian and Ubuntu install the server's programs, a folder for each version.
const DEBIAN_ROOT: &str = "/usr/lib/postgresql";
/// initdb writes some 40 MiB.
const INITDB_DEADLINE: Duration = Duration::from_secs(120);
/// At 125 MiB/s, 16 GiB take about two minutes in each direction.
const BACKUP_DEADLINE: Duration = Duration::from_secs(600);
/// A new cluster starts within a second; a busy machine takes longer.
const START_DEADLINE: Duration = Duration::from_secs(60);
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// The superuser's name, whatever the system user's name is.
const ROLE: &str = "postgres";
/// What to do as root, if no unprivileged user is known.
const NO_USER: &str = "PostgreSQL refuses to run as root: create a user for it (useradd postgres)";
/// Only part of the socket's name: nothing listens on this port.
const PORT: u16 = 5432;

/// Settings of every server here, and why.
const SETTINGS: [(&str, &str); 9] = [
    ("listen_addresses", ""),                           // see this module's documentation
    ("shared_preload_libraries", "pg_stat_statements"), // counts the temporary bytes that a statement writes
    ("wal_level", "minimal"),                           // loading into a new table writes no log
    ("max_wal_senders", "0"),                           // `minimal` requires it
    ("max_wal_size", "4GB"),                            // no checkpoint in the middle of a query
    ("autovacuum", "off"),                              // no background work that differs between runs
    ("jit", "off"),                                     // compiling takes a share of small runs
    ("max_parallel_workers_per_gather", "0"),           // only one process spills, so that runs compare
    ("log_temp_files", "0"),                            // tells the client the path of each temporary file
];

/// The folder with `initdb` and `postgres`.
#[derive(Clone, Debug)]
pub struct Programs(PathBuf);

impl Programs {
    /// Searches the folder that `pg_config` names, then Debian's folders, newest version first.
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

    fn path(&self, name: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        if !path.exists() {
            bail!("{} is missing: run scripts/setup, or apt-get install postgresql", path.display());
        }
        Ok(path)
    }
}

/// The options of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions<'a> {
    /// An empty folder for the data directory and the socket; other users must be able to reach it.
    pub dir: &'a Path,
    /// Where its log goes.
    pub log: &'a Path,
    /// Its memory limit.
    pub limit: Option<&'a MemoryLimit>,
    /// A program with its first arguments that runs the server; empty for none.
    pub wrapper: &'a [OsString],
    /// Further arguments of `initdb`.
    pub initdb_args: &'a [&'a str],
    /// Settings that override those of every server here.
    pub settings: &'a [(&'a str, &'a str)],
}

impl<'a> ServerOptions<'a> {
    /// A server as in the demo, without a memory limit.
    pub fn new(dir: &'a Path, log: &'a Path) -> Self {
        Self { dir, log, limit: None, wrapper: &[], initdb_args: &[], settings: &[] }
    }
}

/// A running server; ended when dropped.
#[derive(Debug)]
pub struct Server {
    process: Child,
    programs: Programs,
    start: Start,
}

/// What is needed to start the server again.
#[derive(Clone, Debug)]
struct Start {
    data: PathBuf,
    sockets: PathBuf,
    args: Vec<OsString>,
    group_file: Option<PathBuf>,
    wrapper: Vec<OsString>,
    log: PathBuf,
    user: Option<User>,
}

impl Server {
    /// Makes a cluster and starts it.
    pub fn start(options: &ServerOptions<'_>, stop: &StopFlag) -> Result<Self> {
        let programs = Programs::find()?;
        let initdb = programs.path("initdb")?;
        let fixed = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username", ROLE];
        let args = fixed.iter().chain(options.initdb_args).map(OsString::from).collect();
        Self::make_and_start(programs, options, (&initdb, args, INITDB_DEADLINE), stop)
    }

    /// Makes a standby of this server by a base backup, and starts it. This server's settings have to allow
    /// replication. `initdb_args` are not used.
    pub fn start_standby(&self, options: &ServerOptions<'_>, stop: &StopFlag) -> Result<Self> {
        let (backup, mut args) = self.client_program("pg_basebackup")?;
        args.extend(["--write-recovery-conf", "--checkpoint=fast", "--no-sync"].map(OsString::from));
        Self::make_and_start(self.programs.clone(), options, (&backup, args, BACKUP_DEADLINE), stop)
    }

    /// Runs `maker`, which makes the data directory (it gets `-D DIRECTORY`), and starts a server on it.
    fn make_and_start(
        programs: Programs,
        options: &ServerOptions<'_>,
        (maker, mut args, deadline): (&Path, Vec<OsString>, Duration),
        stop: &StopFlag,
    ) -> Result<Self> {
        let user = Self::user()?;
        let (data, sockets) = (options.dir.join("data"), options.dir.join("socket"));
        make_private(&data, user.as_ref())?;
        make_private(&sockets, user.as_ref())?;
        if sockets.as_os_str().len() + "/.s.PGSQL.5432.lock".len() > MAX_SOCKET_PATH_BYTES {
            bail!("the path {} is too long for a socket: choose a shorter --work-dir", sockets.display());
        }
        args.extend(["-D".into(), data.clone().into()]);
        let args: Vec<&OsStr> = args.iter().map(OsString::as_os_str).collect();
        run_as(user.as_ref(), maker, &args, deadline)?;
        let start = Start {
            args: server_args(&data, &sockets, options.settings),
            data,
            sockets,
            group_file: options.limit.map(MemoryLimit::procs_file),
            wrapper: options.wrapper.to_vec(),
            log: options.log.into(),
            user,
        };
        let process = start.spawn(&programs)?;
        let mut server = Self { process, programs, start };
        server.wait_until_ready(stop)?;
        Ok(server)
    }

    /// Ends recovery: the standby is a server of its own from now on, and can be written.
    pub fn promote(&self) -> Result<()> {
        let seconds = START_DEADLINE.as_secs();
        let row = self.connect()?.query_one(&format!("SELECT pg_promote(true, {seconds})"), &[])?;
        ensure!(row.get::<_, bool>(0), "the standby was not promoted within {seconds} s");
        Ok(())
    }

    /// Stops the server if it runs, and starts it again on the same data; its log begins anew.
    pub fn start_again(&mut self, stop: &StopFlag) -> Result<()> {
        self.stop()?;
        self.process = self.start.spawn(&self.programs)?;
        self.wait_until_ready(stop)
    }

    /// Sets the wrapper of the next start; see [`ServerOptions::wrapper`].
    pub fn set_wrapper(&mut self, wrapper: &[OsString]) {
        self.start.wrapper = wrapper.to_vec();
    }

    /// Changes a setting from the next start on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.start.args.extend(["-c".into(), format!("{name}={value}").into()]); // the last one counts
    }

    fn wait_until_ready(&mut self, stop: &StopFlag) -> Result<()> {
        let config = self.config();
        self.process.wait_until(START_DEADLINE, |_| stop.check().map(|()| config.connect(NoTls).is_ok()))
    }

    fn config(&self) -> Config {
        let mut config = Config::new();
        config.host_path(&self.start.sockets).port(PORT).user(ROLE).dbname("postgres");
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

    /// The version that it reports, as in `15.14`.
    pub fn version(&self) -> Result<String> {
        let row =
            self.connect()?.query_one("SELECT split_part(current_setting('server_version'), ' ', 1)", &[])?;
        Ok(row.get(0))
    }

    /// Creates a tablespace `name` in the new folder `dir`, which the server's user will own.
    pub fn create_tablespace(&self, name: &str, dir: &Path) -> Result<()> {
        make_private(dir, self.start.user.as_ref())?;
        let location = dir.to_str().with_context(|| format!("{} is not UTF-8", dir.display()))?;
        let statement = format!("CREATE TABLESPACE {name} LOCATION '{}'", location.replace('\'', "''"));
        self.connect()?
            .batch_execute(&statement)
            .with_context(|| format!("cannot make a tablespace in {location}"))
    }

    /// Whether servers run as another user than this program. Mounts must then admit that user.
    pub fn is_other_user() -> bool {
        is_root()
    }

    /// The user that servers run as; `None` for our own.
    pub fn user() -> Result<Option<User>> {
        if is_root() { User::first_of(&["postgres", "nobody"]).context(NO_USER).map(Some) } else { Ok(None) }
    }

    /// Its data directory.
    pub fn data_directory(&self) -> &Path {
        &self.start.data
    }

    /// The process id of the postmaster.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// An error, with the log's last lines, if the server has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        if !self.process.is_running()? {
            bail!("PostgreSQL has ended{}", self.process.last_words());
        }
        Ok(())
    }

    /// Shuts the server down (fast mode). A second call does nothing.
    pub fn stop(&mut self) -> Result<()> {
        self.process.end()
    }

    /// Shuts the server down in immediate mode: it writes nothing more, so the next start recovers from the
    /// log.
    pub fn stop_immediately(&mut self) -> Result<()> {
        self.process.signal(Signal::QUIT)?;
        self.process.end()
    }

    /// One of PostgreSQL's own programs, with the arguments that make it a client of this server.
    pub fn client_program(&self, name: &str) -> Result<(PathBuf, Vec<OsString>)> {
        let mut args: Vec<OsString> = vec!["-h".into(), self.start.sockets.clone().into()];
        args.extend(["-p".into(), PORT.to_string().into(), "-U".into(), ROLE.into()]);
        Ok((self.programs.path(name)?, args))
    }

    /// Reads every page of a stopped server with data checksums; an error names the first that is wrong.
    pub fn verify_checksums(&self, deadline: Duration) -> Result<String> {
        let args = ["--check".as_ref(), "-D".as_ref(), self.start.data.as_ref()];
        run_as(self.start.user.as_ref(), &self.programs.path("pg_checksums")?, &args, deadline)
    }
}

impl Start {
    fn spawn(&self, programs: &Programs) -> Result<Child> {
        let program = programs.path("postgres")?;
        let launch = Launch {
            user: self.user.as_ref(),
            group_file: self.group_file.clone(),
            stop_signal: Signal::INT, // fast shutdown: rolls back, does not wait for clients
            wrapper: &self.wrapper,
            ..Launch::new("PostgreSQL", &program, self.args.clone())
        };
        Child::logged(&launch, &self.log)
    }
}

fn server_args(data: &Path, sockets: &Path, settings: &[(&str, &str)]) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["-D".into(), data.into(), "-k".into(), sockets.into()];
    args.extend(["-p".into(), PORT.to_string().into()]);
    for (name, value) in SETTINGS.iter().chain(settings) {
        args.extend(["-c".into(), format!("{name}={value}").into()]);
    }
    args
}

/// Creates a folder that only the server's user may enter.
fn make_private(dir: &Path, user: Option<&User>) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("cannot make {}", dir.display()))?;
    user.map_or(Ok(()), |user| user.own(dir))
}
