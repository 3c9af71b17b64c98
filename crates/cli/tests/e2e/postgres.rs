//! A real PostgreSQL with its temporary files in far memory, which loses a node.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use farpool_bench::StopFlag;
use farpool_bench::postgres::{Server, ServerOptions};

use crate::support::{Mount, Pool, PoolOptions, within};

/// The pool gives up a lost node within 5 s; the rest is for the query to reach a lost page, and for a busy
/// machine.
const ERROR_DEADLINE: Duration = Duration::from_secs(20);
/// Far more than fits in `work_mem`: some 150 MB of sort runs.
const SORTED: &str = "SELECT * FROM numbers ORDER BY noise, i";

#[test]
fn node_killed_while_postgresql_spills_fails_the_query_and_the_server_keeps_running() {
    let mut pool = Pool::start(PoolOptions { memory: "512MiB", ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, if Server::is_other_user() { &["--allow-other"] } else { &[] });
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let server_dir = dir.path().join("server");
    fs::create_dir(&server_dir).unwrap();
    let log = dir.path().join("log");
    let options = ServerOptions::new(&server_dir, &log);
    let mut server = Server::start(&options, &StopFlag::default()).unwrap();
    server.create_tablespace("far", &mount.file("space")).unwrap();
    let mut client = server.connect().unwrap();
    client
        .batch_execute(
            "CREATE TABLE numbers AS SELECT i, md5(i::text) AS noise FROM generate_series(1, 2000000) AS i; \
             SET work_mem = '1MB'; SET temp_tablespaces = far",
        )
        .unwrap();
    // Once the first row is there, everything has been sorted into runs, and the others are merged from them.
    client.batch_execute(&format!("BEGIN; DECLARE sorted CURSOR FOR {SORTED}")).unwrap();
    assert_eq!(client.query("FETCH 1000 FROM sorted", &[]).unwrap().len(), 1000);
    let runs = files_below(mount.path());
    assert!(runs.iter().map(|run| fs::metadata(run).unwrap().len()).sum::<u64>() > 16 << 20);

    pool.nodes[0].kill();
    let lost = || runs.iter().any(|run| read_past_the_cache(run).is_err());
    within(ERROR_DEADLINE, "the data on the lost node are lost", lost);
    let query = std::thread::spawn(move || (client.batch_execute("MOVE ALL FROM sorted"), client));
    within(ERROR_DEADLINE, "the query ends", || query.is_finished());
    let (result, mut client) = query.join().unwrap();
    let error = result.expect_err("half of the sort's runs were on the lost node");
    // 58030 is io_error, PostgreSQL's code for EIO.
    assert_eq!(error.code().map(|code| code.code()), Some("58030"), "{error:?}");

    client.batch_execute("ROLLBACK").unwrap();
    client.batch_execute("SET temp_tablespaces = ''").unwrap();
    let local =
        client.query_one(&format!("SELECT count(*) FROM ({SORTED} OFFSET 0) AS sorted"), &[]).unwrap();
    assert_eq!(local.get::<_, i64>(0), 2_000_000);
    server.check_alive().unwrap();
    drop(client);
    server.stop().unwrap();
    mount.unmount();
}

/// All files of the tablespace.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => files.extend(files_below(&entry.path())),
            false => files.push(entry.path()),
        }
    }
    files
}

/// Reads a file after the kernel has dropped its pages.
fn read_past_the_cache(path: &Path) -> std::io::Result<()> {
    let mut file = fs::File::open(path)?;
    let _synced = file.sync_all(); // dirty pages cannot be dropped; an error shows up in the read as well
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    std::io::copy(&mut file, &mut std::io::sink()).map(drop)
}
