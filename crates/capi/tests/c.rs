//! The library as C programs use it: the tests install it, compile and link programs against it, and run them
//! on a real pool.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::time::Duration;

use farpool_broker::BrokerConfig;
use farpool_control::whereabouts::{BROKER_ADDRESS, TLS_FOLDER};
use farpool_control::{SERVER_NAME, Tls};
use farpool_fabric::TransportChoice;
use farpool_node::NodeConfig;
use farpool_pool::{Pool as FarPool, PoolConfig};
use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const REGION_BYTES: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A broker and two nodes of this process.
struct Pool {
    runtime: Runtime,
    broker: SocketAddr,
    directory: TempDir,
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Makes the certificates of a pool in a folder.
fn make_certificates(folder: &Path) {
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap().self_signed(&key).unwrap();
    std::fs::create_dir_all(folder).unwrap();
    for (name, pem) in
        [("ca.pem", certificate.pem()), ("cert.pem", certificate.pem()), ("key.pem", key.serialize_pem())]
    {
        std::fs::write(folder.join(name), pem).unwrap();
    }
}

impl Pool {
    fn start(regions_each: u64) -> Self {
        Self::in_directory(tempfile::tempdir().unwrap(), regions_each, None)
    }

    /// A pool with certificates, published where programs look when they are not given an address.
    fn published(regions_each: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let run_dir = directory.path().join("farpool");
        let tls_dir = run_dir.join(TLS_FOLDER);
        make_certificates(&tls_dir);
        let pool = Self::in_directory(directory, regions_each, Some(Tls::load(&tls_dir).unwrap()));
        std::fs::write(run_dir.join(BROKER_ADDRESS), format!("{}\n", pool.broker)).unwrap();
        pool
    }

    fn in_directory(directory: TempDir, regions_each: u64, tls: Option<Tls>) -> Self {
        let runtime = Runtime::new().unwrap();
        let (ready, is_ready) = mpsc::channel();
        let store = directory.path().join("broker.redb");
        let config = BrokerConfig { listen: any_port(), store, tls: tls.clone() };
        runtime.spawn(async move {
            let on_ready = |address| ready.send(address).unwrap();
            farpool_broker::run(config, on_ready, std::future::pending()).await.unwrap();
        });
        let broker = is_ready.recv_timeout(PATIENCE).unwrap();
        let pool = Pool { runtime, broker, directory };
        (0..2).for_each(|number| pool.start_node(number, regions_each, tls.clone()));
        pool
    }

    fn start_node(&self, number: u32, regions: u64, tls: Option<Tls>) {
        let config = NodeConfig {
            broker: self.broker.to_string(),
            control_listen: any_port(),
            data_listen: any_port(),
            advertise: None,
            register_within: PATIENCE,
            shm_socket: Some(self.directory.path().join(format!("node{number}.sock"))),
            card: None,
            memory_bytes: regions * REGION_BYTES,
            reserve_bytes: 0,
            region_bytes: REGION_BYTES,
            locking: farpool_node::Locking::None,
            state_dir: None,
            tls,
        };
        let (ready, is_ready) = mpsc::channel();
        self.runtime.spawn(async move {
            let on_ready = |_: &_| ready.send(()).unwrap();
            farpool_node::run(config, on_ready, std::future::pending()).await.unwrap();
        });
        is_ready.recv_timeout(PATIENCE).unwrap();
    }
}

/// The library installed in a folder, and programs built against it.
struct Installed {
    prefix: TempDir,
}

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The shared library that was built with these tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let found = test.ancestors().map(|folder| folder.join("libfarpool.so")).find(|path| path.exists());
    found.expect("cargo builds the library beside its tests")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

impl Installed {
    fn new() -> Self {
        let prefix = tempfile::tempdir().unwrap();
        run(Command::new(crate_folder().join("install")).arg(library()).arg(prefix.path()));
        Installed { prefix }
    }

    /// Builds a C program as its manual says.
    fn build(&self, source: &Path) -> PathBuf {
        let flags = run(Command::new("pkg-config")
            .args(["--cflags", "--libs", "farpool"])
            .env("PKG_CONFIG_PATH", self.prefix.path().join("lib/pkgconfig")));
        let program = self.prefix.path().join(source.file_stem().unwrap());
        run(Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_DEFAULT_SOURCE", "-o"])
            .arg(&program)
            .arg(source)
            .args(String::from_utf8(flags.stdout).unwrap().split_whitespace())
            .arg("-lpthread"));
        program
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.prefix.path().join("lib"));
        command.env_remove("FARPOOL_BROKER").env_remove("FARPOOL_TLS_DIR");
        // So that no pool of this user is found by accident.
        command.env("XDG_RUNTIME_DIR", "/nonexistent");
        command
    }
}

#[test]
fn the_example_builds_against_the_installed_library_and_spills_to_a_pool() {
    let pool = Pool::start(24);
    let installed = Installed::new();
    let spill = installed.build(&crate_folder().join("example/spill.c"));
    let output = run(installed.command(&spill).args(["20", &pool.broker.to_string()]));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "80 blocks went to far memory and came back\n");
    let no_broker = installed.command(&spill).args(["1", "127.0.0.1:1"]).output().unwrap();
    assert_eq!(no_broker.status.code(), Some(1));
    let complaint = String::from_utf8(no_broker.stderr).unwrap();
    assert!(complaint.contains("127.0.0.1:1") && complaint.contains("farpool up"), "{complaint}");
}

#[test]
fn a_broker_that_wants_tls_gives_the_same_error_in_c_and_in_rust() {
    let directory = tempfile::tempdir().unwrap();
    make_certificates(directory.path());
    let runtime = Runtime::new().unwrap();
    let (ready, is_ready) = mpsc::channel();
    let tls = Some(Tls::load(directory.path()).unwrap());
    let config = BrokerConfig { listen: any_port(), store: directory.path().join("broker.redb"), tls };
    runtime.spawn(farpool_broker::run(config, move |at| ready.send(at).unwrap(), std::future::pending()));
    let broker = is_ready.recv_timeout(PATIENCE).unwrap().to_string();

    let installed = Installed::new();
    let spill = installed.build(&crate_folder().join("example/spill.c"));
    let output = installed.command(&spill).args(["1", &broker]).output().unwrap();
    let in_c = String::from_utf8(output.stderr).unwrap();
    assert!(in_c.contains("wants TLS") && in_c.contains("--tls-dir"), "{in_c}");
    let config = PoolConfig { broker, tls: None, transport: TransportChoice::Auto.into(), limit_bytes: None };
    let in_rust = FarPool::connect(config).err().unwrap().to_string();
    assert!(in_c.contains(&in_rust), "{in_c}\n{in_rust}");
}

#[test]
fn the_program_on_the_page_for_newcomers_says_hello() {
    let pool = Pool::published(4);
    let installed = Installed::new();
    let page = std::fs::read_to_string(crate_folder().join("../../docs/src/how-to/c-library.md")).unwrap();
    let program = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let source = pool.directory.path().join("hello.c");
    std::fs::write(&source, program).unwrap();
    let hello = installed.build(&source);
    let output = run(installed.command(&hello).env("XDG_RUNTIME_DIR", pool.directory.path()));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "hello\n");
}

/// What an HTTP/2 server says first: an empty frame SETTINGS (RFC 9113, section 3.4).
const EMPTY_SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

#[test]
fn a_broker_that_hangs_up_is_an_error_and_never_a_signal() {
    const TIMES: usize = 5; // each tries several connections
    let installed = Installed::new();
    let spill = installed.build(&crate_folder().join("example/spill.c"));
    let broker = TcpListener::bind(any_port()).unwrap();
    let address = broker.local_addr().unwrap().to_string();
    // The broker closes the connection while the library is still writing its request. Since the broker has
    // not read the request, the kernel answers with a reset.
    std::thread::spawn(move || {
        for stream in broker.incoming() {
            let _ = stream.unwrap().write_all(&EMPTY_SETTINGS); // the program may have ended
        }
    });
    for _ in 0..TIMES {
        let output = installed.command(&spill).args(["1", &address]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
}

#[test]
fn every_call_does_what_the_header_says_and_refuses_what_it_cannot_do() {
    let pool = Pool::start(4);
    let installed = Installed::new();
    let calls = installed.build(&crate_folder().join("tests/calls.c"));
    run(installed.command(&calls).arg(pool.broker.to_string()));
}

#[test]
fn what_was_installed_below_destdir_is_gone_after_removing_it() {
    let dir = tempfile::tempdir().unwrap();
    let install = |what: &std::ffi::OsStr| {
        let mut command = Command::new(crate_folder().join("install"));
        run(command.arg(what).arg("/opt/far/").env("DESTDIR", dir.path()));
    };
    let files = || {
        let found = run(Command::new("find").arg(dir.path()).args(["-not", "-type", "d", "-printf", "%P\n"]));
        String::from_utf8(found.stdout).unwrap().lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    install(library().as_os_str());
    let version = env!("CARGO_PKG_VERSION");
    let expected = [
        "include/farpool.h",
        "lib/libfarpool.so",
        "lib/libfarpool.so.0",
        &format!("lib/libfarpool.so.{version}"),
        "lib/pkgconfig/farpool.pc",
        "share/man/man3/farpool.3",
    ];
    assert_eq!(files(), expected.map(|name| format!("opt/far/{name}")).into());
    let described = std::fs::read_to_string(dir.path().join("opt/far/lib/pkgconfig/farpool.pc")).unwrap();
    assert!(described.contains("prefix=/opt/far\n") && described.contains(version), "{described}");
    install("--remove".as_ref());
    assert_eq!(files(), BTreeSet::new());
}

#[test]
fn the_header_is_strict_c99_and_cpp() {
    let dir = tempfile::tempdir().unwrap();
    for (compiler, standard, source) in [("cc", "-std=c99", "c.c"), ("c++", "-std=c++11", "c.cpp")] {
        let source = dir.path().join(source);
        std::fs::write(
            &source,
            "#include <farpool.h>\nconst char *version(void) { return farpool_version(); }\n",
        )
        .unwrap();
        run(Command::new(compiler)
            .args([standard, "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
            .arg(crate_folder().join("include"))
            .arg(&source));
    }
}

#[test]
fn the_library_exports_what_its_header_declares_and_nothing_else() {
    let header = std::fs::read_to_string(crate_folder().join("include/farpool.h")).unwrap();
    let without_comments =
        header.split("/*").map(|part| part.split("*/").last().unwrap()).collect::<String>();
    let declared: BTreeSet<String> = without_comments
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '('))
        .filter_map(|word| word.split_once('(').map(|(name, _)| name))
        .filter(|name| name.starts_with("farpool_"))
        .map(str::to_owned)
        .collect();
    assert!(declared.len() > 10, "{declared:?}");
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let exported: BTreeSet<String> = String::from_utf8(symbols.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2).map(str::to_owned))
        .collect();
    assert_eq!(exported, declared);
}

#[test]
fn the_manual_names_every_function_and_error_of_the_library() {
    let header = std::fs::read_to_string(crate_folder().join("include/farpool.h")).unwrap();
    let manual = std::fs::read_to_string(crate_folder().join("man/farpool.3")).unwrap();
    for name in header.split(|c: char| !(c.is_ascii_lowercase() || c == '_')) {
        assert!(!name.starts_with("farpool_") || manual.contains(name), "{name} is not in the manual");
    }
    for name in header.split(|c: char| !c.is_ascii_uppercase()).filter(|name| name.len() > 4) {
        assert!(!name.starts_with('E') || manual.contains(name), "{name} is not in the manual");
    }
}
