//! The papers' figures about TPC-H: they are complete and written to files, and nothing is left behind. No
//! test asserts a speed.

use std::process::Command;

use farpool_bench::DEFAULT_WORK_DIR;

/// 300,000 line items: with the least memory, the larger joins spill.
const SCALE: &str = "0.05";

#[test]
fn figures_about_tpc_h_have_all_queries_and_leave_nothing() {
    let (out, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in(DEFAULT_WORK_DIR).unwrap());
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--", env!("CARGO_BIN_EXE_farpool"), "bench", "paper", "files"]);
    command.args([
        "--figure",
        "damon-table1,damon4,damon5",
        "--database-rounds",
        "1",
        "--scale",
        SCALE,
        "--out",
    ]);
    let output = command.arg(out.path()).arg("--work-dir").arg(work.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document = std::fs::read_to_string(out.path().join("files.md")).unwrap();
    for query in 1..=22 {
        assert!(document.contains(&format!("| q{query:02} |")), "q{query:02}: {document}");
    }
    for query in ["hash+sort", "group"] {
        assert!(document.contains(&format!("| {query} |")), "{query}: {document}");
    }
    for figure in ["damon-table1", "damon4", "damon5"] {
        assert!(document.contains(&format!("## {figure}: ")), "{figure}: {document}");
    }
    let drawing = std::fs::read_to_string(out.path().join("files-damon5.svg")).unwrap();
    assert!(drawing.contains("<polyline points=") && !drawing.contains("<polyline points=\"\""), "{drawing}");
    assert_eq!(std::fs::read_dir(&work).unwrap().count(), 0);
}
