//! `farpool bench paper`: its figures are complete and written to files, and it leaves nothing behind. No
//! test asserts a speed.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::Signal;

use crate::preload::interposer;
use crate::support::{
    Process, assert_complaint, children_of, farpool, is_mounted_below, is_running, run_command,
};

/// Folders for temporary files, with a short path because of the sockets in it, and for the document.
struct Scene {
    temporary: tempfile::TempDir,
    out: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Scene { temporary: tempfile::tempdir().unwrap(), out: tempfile::tempdir().unwrap() }
    }

    fn command(&self, figures: &str, seconds: &str) -> std::process::Command {
        let mut command = farpool(["bench", "paper", "files", "--without-peers", "--figure", figures]);
        command.args(["--rounds", "2", "--seconds", seconds, "--footprint", "16MiB", "--out"]);
        command
            .arg(self.out.path())
            .env("TMPDIR", self.temporary.path())
            .env("FARPOOL_PRELOAD", interposer());
        command
    }

    /// The document after measuring these figures.
    #[track_caller]
    fn measure(&self, figures: &str) -> String {
        let mut command = self.command(figures, "0.02");
        command.arg("--work-dir").arg(self.temporary.path());
        let output = run_command(command);
        assert!(output.status.success(), "{}", output.stderr);
        self.assert_clean();
        std::fs::read_to_string(self.out.path().join("files.md")).unwrap()
    }

    #[track_caller]
    fn assert_clean(&self) {
        assert_eq!(std::fs::read_dir(&self.temporary).unwrap().count(), 0);
        assert!(!is_mounted_below(self.temporary.path()));
    }
}

/// Every row of a figure's tables has all its figures.
#[track_caller]
fn assert_whole(document: &str, figure: &str) {
    let start = document.find(&format!("## {figure}: ")).unwrap_or_else(|| panic!("no {figure}: {document}"));
    let part = document[start..].split("<!-- figure ").next().unwrap();
    for note in ["Question", "Floor", "Method", "Conditions"] {
        assert!(part.contains(&format!("**{note}**")), "{part}");
    }
    let rows: Vec<&str> = part.lines().filter(|line| line.starts_with("| ")).collect();
    assert!(rows.len() > 2 && rows.iter().all(|row| !row.contains("| – |")), "{part}");
}

#[test]
fn figures_about_one_file_share_a_run_and_each_is_whole() {
    let scene = Scene::new();
    let document = scene.measure("damon2,damon3,sigmod3,sigmod4");
    for figure in ["damon2", "damon3", "sigmod3", "sigmod4"] {
        assert_whole(&document, figure);
        assert!(scene.out.path().join(format!("files-{figure}.svg")).exists());
    }
    for row in [
        "bare FUSE file",
        "far memory, shm: none",
        "far memory, shm: parity 4+1",
        "far memory, tcp: stripe",
        "far memory, tcp: mirror",
        "tmpfs",
        "the machine's disk",
    ] {
        assert!(document.contains(&format!("| {row}")), "{row}: {document}");
    }
    let promise = "8 KiB random read, p50: far memory, shm: stripe ≤ 1.5 × bare FUSE file (the floor)";
    assert!(
        document.contains(&format!("| [damon3](#damon3-latency-of-small-transfers) | {promise} |")),
        "{document}"
    );
    assert!(document.contains("far memory, shm: parity 4+1 ≥ 0.6 × far memory, shm: stripe"), "{document}");
}

#[test]
fn programs_with_the_interposer_stand_beside_tmpfs_and_a_ping_pong() {
    let scene = Scene::new();
    let document = scene.measure("interposer");
    assert_whole(&document, "interposer");
    for row in [
        "polling ping-pong over TCP",
        "interposer, shm",
        "interposer, tcp",
        "interposer, tcp, 2 nodes",
        "the mount alone, tcp",
    ] {
        assert!(document.contains(&format!("| {row} |")), "{row}: {document}");
    }
    assert!(document.contains("interposer, tcp ≤ 1.35 × polling ping-pong over TCP"), "{document}");
}

#[test]
fn more_nodes_and_more_clients_and_the_checksum_are_added_to_the_document() {
    let scene = Scene::new();
    scene.measure("checksum");
    scene.measure("sigmod6");
    let document = scene.measure("sigmod5");
    for figure in ["sigmod5", "sigmod6", "checksum"] {
        assert_whole(&document, figure);
    }
    for row in ["shm, 8 nodes", "tcp, 1 node", "shm, 1 client", "tcp, 8 clients", "shm", "tcp"] {
        assert!(document.contains(&format!("| {row} |")), "{row}: {document}");
    }
}

#[test]
fn figures_with_a_database_are_whole_and_leave_nothing() {
    let scene = Scene::new();
    // The server's user must have access.
    let work =
        tempfile::Builder::new().permissions(Permissions::from_mode(0o711)).tempdir_in("/var/tmp").unwrap();
    let mut command = scene.command("range-scan,sigmod13,sigmod14", "0.02");
    command.args(["--database-rounds", "1", "--scale", "0.05", "--work-dir"]).arg(work.path());
    let output = run_command(command);
    assert!(output.status.success(), "{}", output.stderr);
    let document = std::fs::read_to_string(scene.out.path().join("files.md")).unwrap();
    for figure in ["range-scan", "sigmod13", "sigmod14"] {
        assert_whole(&document, figure);
    }
    for row in ["borrowed over tcp", "tmpfs", "mount alone, 2 nodes, shm", "the machine's disk"] {
        assert!(document.contains(&format!("| {row} |")), "{row}: {document}");
    }
    let by_calls = |row: &str| -> f64 {
        // Sigmod14 is last.
        let row = document.lines().rfind(|line| line.starts_with(&format!("| {row} |"))).unwrap();
        row.split('|').nth_back(1).unwrap().replace('\u{202f}', "").trim().parse().unwrap()
    };
    let (served, asked) = (by_calls("interposer, 2 nodes, shm"), by_calls("mount alone, 2 nodes, shm"));
    assert!(
        served < asked / 2.0,
        "the server asked the kernel for {served} MB with the interposer, {asked} MB without"
    );
    let drawing = std::fs::read_to_string(scene.out.path().join("files-sigmod14.svg")).unwrap();
    let is_sampled = drawing.contains("<polyline points=") && !drawing.contains("<polyline points=\"\"");
    assert!(is_sampled, "nothing was sampled: {drawing}");
    assert_eq!(std::fs::read_dir(&work).unwrap().count(), 0);
    assert!(!is_mounted_below(work.path()));
    scene.assert_clean();
}

/// The page cache's figures that need neither a database nor root.
#[test]
fn figures_of_the_page_cache_are_whole_and_say_what_was_promised() {
    let scene = Scene::new();
    let work = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut command = farpool(["bench", "paper", "cache", "--figure", "cached-page,cached-hits"]);
    command.args(["--rounds", "2", "--seconds", "0.24", "--scale", "0.01", "--out"]).arg(scene.out.path());
    command.arg("--work-dir").arg(work.path());
    command.env("TMPDIR", scene.temporary.path()).env("FARPOOL_PRELOAD", interposer());
    let output = run_command(command);
    assert!(output.status.success(), "{}", output.stderr);
    let document = std::fs::read_to_string(scene.out.path().join("cache.md")).unwrap();
    for figure in ["cached-page", "cached-hits"] {
        assert_whole(&document, figure);
        assert!(scene.out.path().join(format!("cache-{figure}.svg")).exists());
    }
    for row in ["tmpfs", "page cache, shm", "page cache, tcp", "Zipf and scans", "uniform"] {
        assert!(document.contains(&format!("\n| {row} |")), "{row}: {document}");
    }
    // No speed is judged here. Hit rates are the same each time.
    let promise = |what: &str| document.lines().find(|line| line.contains(what)).expect(what).to_owned();
    assert!(promise("page cache, shm | ≤ 1.25 × tmpfs | ≤ 1 × |").contains("cached-page"));
    assert!(promise("Zipf and scans | ≥ 60 % |").ends_with("| yes |"), "{document}");
    assert_eq!(std::fs::read_dir(&work).unwrap().count(), 0);
    scene.assert_clean();
}

#[test]
fn a_figure_of_another_document_is_a_usage_error_that_names_the_command() {
    let args = ["bench", "paper", "files", "--figure", "cached-hits", "--out", "/nonexistent"];
    assert_complaint(&run_command(farpool(args)), 2, "farpool bench paper cache --figure cached-hits");
}

#[test]
fn interrupted_figure_leaves_no_process_mount_or_folder() {
    let scene = Scene::new();
    let mut command = scene.command("damon3", "600");
    command.arg("--work-dir").arg(scene.temporary.path());
    let mut bench = Process::start("farpool bench paper", command);
    bench.await_complaint("round 1");
    let children = children_of(bench.id());
    bench.signal(Signal::INT);
    let output = bench.wait();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.contains("interrupted"), "{}", output.stderr);
    // The bare file, eight mounts with five nodes and a broker each, and a client for every volume.
    assert!(children.len() >= 66, "{children:?}");
    assert!(children.iter().all(|&id| !is_running(id)));
    scene.assert_clean();
}

#[test]
fn figure_that_does_not_exist_is_a_usage_error_that_names_those_that_do() {
    let mut command = farpool(["bench", "paper", "files", "--figure", "damon1", "--out"]);
    command.arg(Path::new("/nonexistent"));
    assert_complaint(&run_command(command), 2, "sigmod5");
}
