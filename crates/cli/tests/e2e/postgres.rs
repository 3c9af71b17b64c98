//! A real PostgreSQL whose temporary files are in far memory, and whose far memory dies under it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use farpool_workload::StopFlag;
use farpool_workload::postgres::{Server, ServerOptions};

use crate::support::{Mount, PATIENCE, Pool, PoolOptions, within};

/// What the pool promises for a node that is gone (5 s), time for the query to come to a lost page, and a busy machine.
const ERROR_DEADLINE: Duration = Duration::from_secs(20);
/// Far more than fits in `work_mem`: some 150 MB of sort runs.
const SORT: &str = "SELECT count(*) FROM (SELECT * FROM numbers ORDER BY noise, i OFFSET 0) AS sorted";

#[test]
fn node_killed_while_postgresql_spills_fails_the_query_and_the_server_lives_on() {
    let mut pool = Pool::start(PoolOptions { memory: "512MiB", ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, if Server::is_other_user() { &["--allow-other"] } else { &[] });
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let server_dir = dir.path().join("server");
    fs::create_dir(&server_dir).unwrap();
    let options = ServerOptions { dir: &server_dir, log: &dir.path().join("log"), limit: None };
    let mut server = Server::start(&options, &StopFlag::default()).unwrap();
    server.create_tablespace("far", &mount.file("space")).unwrap();
    let mut client = server.connect().unwrap();
    client
        .batch_execute(
            "CREATE TABLE numbers AS SELECT i, md5(i::text) AS noise FROM generate_series(1, 2000000) AS i; \
             SET work_mem = '1MB'; SET temp_tablespaces = far",
        )
        .unwrap();
    let healthy = client.query_one(SORT, &[]).unwrap();
    assert_eq!(healthy.get::<_, i64>(0), 2_000_000);

    let query = std::thread::spawn(move || (client.query_one(SORT, &[]), client));
    within(PATIENCE, "the query spills into far memory", || spilled_bytes(&mount) > 16 << 20);
    pool.nodes[0].kill();
    let killed = Instant::now();
    within(ERROR_DEADLINE, "the query ends", || query.is_finished());
    let (result, mut client) = query.join().unwrap();
    let error = result.expect_err("half of the sort's runs were on the lost node");
    // 58030 is io_error: what PostgreSQL makes of EIO.
    assert_eq!(error.code().map(|code| code.code()), Some("58030"), "{error:?} after {:?}", killed.elapsed());

    client.batch_execute("SET temp_tablespaces = ''").unwrap();
    let local = client.query_one(SORT, &[]).unwrap();
    assert_eq!(local.get::<_, i64>(0), 2_000_000);
    server.check_alive().unwrap();
    drop(client);
    server.stop().unwrap();
    mount.unmount();
}

/// Bytes of all files in the tablespace.
fn spilled_bytes(mount: &Mount) -> u64 {
    fn sum(dir: &std::path::Path) -> u64 {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let bytes = |entry: fs::DirEntry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => sum(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0, // removed meanwhile
        };
        entries.map(bytes).sum()
    }
    sum(mount.path())
}
