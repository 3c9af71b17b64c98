//! `farpool db shell`: what it shows, what it writes, and what it refuses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use farpool_namdb::{Database, Table, TableOptions};
use serde::{Deserialize, Serialize};

use crate::database::{Ground, in_plain_text};
use crate::support::{Output, Process, assert_complaint, run_command};

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Account {
    owner: String,
    cents: i64,
    limit: Option<u32>,
}

const TYPE: &str = "accounts={owner: string, cents: i64, limit: option<u32>}";

fn account(number: u64) -> Account {
    let owner = ["Ada", "Grace, of \"COBOL\"", "", "\"\n"][number as usize % 4].to_owned();
    Account { owner, cents: -(number as i64), limit: (!number.is_multiple_of(3)).then_some(number as u32) }
}

/// A database with rows in two tables, of which one is ordered.
struct Rows {
    ground: Ground,
    _up: Process,
    database: Database,
}

impl Rows {
    fn new(count: u64) -> Rows {
        let ground = Ground::new();
        let up = ground.up();
        let database = Database::open(&ground.file(), &in_plain_text()).unwrap();
        let client = database.client().unwrap();
        let rows = TableOptions::rows(100);
        let accounts: Table<(u8, u64), Account> = client.create_table("accounts", &rows.ordered()).unwrap();
        let plain: Table<str, u32> = client.create_table("plain", &rows).unwrap();
        for number in 0..count {
            client.transact(async |tx| tx.insert(&accounts, (1, number), account(number)).await).unwrap();
        }
        client.transact(async |tx| tx.insert(&plain, "a", 300).await).unwrap();
        drop((accounts, plain, client));
        Rows { ground, _up: up, database }
    }

    /// Runs these commands.
    fn shell(&self, commands: &[&str]) -> Output {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let args: Vec<&str> = ["--rows", TYPE].into_iter().chain(commands).collect();
        run_command(self.ground.command("shell", "auto", &args))
    }

    /// What the shell prints for these commands, without the last end of a line.
    #[track_caller]
    fn told(&self, commands: &[&str]) -> String {
        let output = self.shell(commands);
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }

    fn all(&self) -> Vec<((u8, u64), Account)> {
        let client = self.database.client().unwrap();
        let accounts: Table<(u8, u64), Account> = client.open_table("accounts").unwrap();
        client.transact(async |tx| tx.scan(&accounts, ..).collect().await).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.ground.file().with_file_name(name)
    }
}

#[test]
fn rows_are_shown_and_changed_as_json() {
    let rows = Rows::new(150);
    let tables = rows.told(&["tables"]);
    assert!(
        tables.contains("accounts") && tables.contains("(u8, u64)") && tables.contains("plain"),
        "{tables}"
    );
    assert_eq!(rows.told(&["count accounts", "count plain"]), "150\n1");
    assert_eq!(rows.told(&["get accounts [1, 4]"]), "{\"cents\":-4,\"limit\":4,\"owner\":\"Ada\"}");
    let output = rows.shell(&["scan accounts [1, 7] limit 2"]);
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{output:?}");
    assert!(lines[0].starts_with("{\"key\":[1,7],\"row\":{") && lines[1].contains("[1,8]"), "{output:?}");
    assert!(output.stderr.contains("the next one has the key [1,9]"), "{output:?}");
    assert_eq!(rows.told(&["scan accounts [1, 148] [2, 0]"]).lines().count(), 2);
    assert_eq!(rows.told(&["scan accounts [2, 0] [1, 0]"]), "");
    // A table without an order, and rows of a type that the shell was not told.
    let plain = rows.told(&["get plain \"a\"", "scan plain", "rows plain u32", "get plain \"a\""]);
    assert!(plain.starts_with("\"ac02") && plain.ends_with("\n300"), "{plain}");

    rows.told(&[
        "put accounts [1, 4] {\"owner\": \"Eve\", \"cents\": 5, \"limit\": null}",
        "delete accounts [1, 5]",
    ]);
    rows.told(&["put accounts [0, 9] {\"owner\": \"\", \"cents\": 6, \"limit\": 7}"]);
    let all = rows.all();
    assert_eq!(all.len(), 150);
    assert_eq!(all[0], ((0, 9), Account { owner: String::new(), cents: 6, limit: Some(7) }));
    assert_eq!(all[5], ((1, 4), Account { owner: "Eve".to_owned(), cents: 5, limit: None }));
    assert_eq!(all[6].0, (1, 6));
}

#[test]
fn rows_go_to_files_and_come_back() {
    let rows = Rows::new(250);
    let before = rows.all();
    for name in ["all.jsonl", "all.csv"] {
        let file = rows.path(name).display().to_string();
        assert_eq!(rows.told(&[&format!("export accounts {file}")]), "250 rows");
        let client = rows.database.client().unwrap();
        client.drop_table("accounts").unwrap();
        client.create_table::<(u8, u64), Account>("accounts", &TableOptions::rows(100).ordered()).unwrap();
        drop(client);
        assert_eq!(rows.told(&[&format!("import accounts {file}"), "count accounts"]), "250 rows\n250");
        assert_eq!(rows.all(), before, "{name}");
    }
    assert!(!rows.path("all.csv.part").exists());
    let csv = fs::read_to_string(rows.path("all.csv")).unwrap();
    assert!(csv.starts_with("key.0,key.1,owner,cents,limit\n1,0,Ada,0,\n1,1,\"Grace, of"), "{csv}");
}

#[test]
fn what_cannot_be_done_is_refused_with_the_reason() {
    let rows = Rows::new(3);
    let client = rows.database.client().unwrap();
    let indexed: Table<u32, u32> = client.create_table("indexed", &TableOptions::rows(10)).unwrap();
    let by_rest = indexed.declare("by_rest", |row: &u32| Some(row % 10));
    client.create_index(&indexed, &by_rest, |_, _| ()).unwrap();
    drop((indexed, client));
    let bad = rows.path("bad.jsonl");
    fs::write(&bad, "{\"key\": [2, 1], \"row\": {\"owner\": \"a\", \"cents\": 1, \"limit\": null}}\n\n{}\n")
        .unwrap();
    let import = format!("import accounts {}", bad.display());
    let other = rows.path("other.csv");
    fs::write(&other, "key.0,key.1,owner,cents\n1,2,a,3\n").unwrap();
    let import_other = format!("import accounts {}", other.display());
    let cases = [
        ("get accounts [1, 77]", "no row with the key [1,77]"),
        ("get accounts 1", "1 is not a value of type (u8, u64)"),
        ("get nothing 1", "nothing"),
        ("scan plain \"a\"", "not kept in order"),
        ("rows accounts {a", "does not describe a type"),
        ("put accounts [1, 0] 5", "5 is not a value of type {owner: string"),
        ("put indexed 1 \"05\"", "by_rest"),
        ("export accounts all.txt", "NAME.csv"),
        ("export accounts /nowhere/all.csv", "cannot export to /nowhere/all.csv"),
        ("drop accounts", "there is no command"),
        (&import, "1 rows were imported, and then: line 3"),
        (&import_other, "there is no column limit"),
    ];
    for (command, fix) in cases {
        assert_complaint(&rows.shell(&[command]), 1, fix);
    }
    assert_eq!(rows.told(&["count accounts"]), "4");
    // A script ends at the first error.
    let script = rows.path("script");
    fs::write(&script, "# comment\ncount accounts\nget accounts 1\ncount accounts\n").unwrap();
    let mut command = rows.ground.command("shell", "auto", &[]);
    let output = command.stdin(File::open(&script).unwrap()).output().unwrap();
    assert_eq!(output.stdout, b"4\n");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("farpool: line 3: ") && output.status.code() == Some(1), "{said}");
}

/// Runs what the page prints, on the database of `farpool db bank`.
#[test]
fn the_shell_prints_what_the_page_shows() {
    let ground = Ground::new();
    let _up = ground.up();
    let bank = run_command(ground.command("bank", "auto", &["--seconds", "0"]));
    assert!(bank.status.success(), "{bank:?}");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/namdb.md");
    let page = fs::read_to_string(page).unwrap();
    let section = page.split("\n## Looking inside\n").nth(1).unwrap();
    let block = section.split("```console\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_farpool")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let shown: Vec<&str> = block.split("$ ").skip(1).collect();
    assert!(shown.len() >= 4, "{block}");
    for shown in shown {
        let (command, wanted) = shown.split_once('\n').unwrap();
        let mut bash = Command::new("bash");
        bash.args(["-c", command]).current_dir(ground.file().parent().unwrap()).env("PATH", &path);
        let output = bash.env("FARPOOL_BROKER", ground.pool_address()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), wanted, "{command}: {output:?}");
    }
}
