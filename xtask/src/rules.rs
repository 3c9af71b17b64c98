//! Rules of the house that can be read off the text: no unfinished code, reasons for dependencies, files of a
//! size that fits a head. What clippy can check is left to clippy.

use std::path::Path;

use anyhow::Result;

use crate::files::{read, with_extension};

/// Columns of a line with a comment, as of code (`rustfmt.toml`), which leaves comments alone.
const COLUMNS_MAX: usize = 110;

/// Lines of a source file: beyond it, a file holds more than one idea.
const FILE_LINES_MAX: usize = 700;

/// What no finished file holds. In halves, because this file is read too.
const UNFINISHED: [&str; 4] =
    [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("db", "g!("), concat!("#[ig", "nore")];

/// Beginnings of a reason for `unsafe` that is found elsewhere. In halves, because this file is read too.
const REFERRING: [&str; 2] = [concat!("SAFE", "TY: as "), concat!("SAFE", "TY: likewise")];

/// Folders with Rust sources.
const SOURCES: [&str; 2] = ["crates", "xtask"];

/// Checks the workspace in the folder `root`.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut complaints = check_manifest(&read(&root.join("Cargo.toml"))?);
    let mut files = Vec::new();
    for folder in SOURCES {
        files.extend(with_extension(&root.join(folder), "rs")?);
    }
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file).to_path_buf();
        let text = read(&file)?;
        complaints.extend(check_source(&name, &text));
        let lost = cited_pages(&text).filter(|page| !root.join(page).exists());
        complaints.extend(lost.map(|page| format!("{}: there is no {page}", name.display())));
    }
    Ok(complaints)
}

fn check_source(name: &Path, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for word in UNFINISHED.iter().filter(|word| line.contains(**word)) {
            complaints.push(format!("{}:{}: {word} in a finished file", name.display(), index + 1));
        }
    }
    let refers = |line: &str| REFERRING.iter().any(|reason| line.contains(reason));
    for (index, _) in text.lines().enumerate().filter(|(_, line)| refers(line)) {
        complaints.push(format!("{}:{}: write the reason for `unsafe` out", name.display(), index + 1));
    }
    for (index, _) in text.lines().enumerate().filter(|(_, line)| has_long_comment(line)) {
        let place = format!("{}:{}", name.display(), index + 1);
        complaints.push(format!("{place}: a comment beyond column {COLUMNS_MAX}: wrap it"));
    }
    let lines = text.lines().count();
    let in_src = name.starts_with("crates") && name.components().any(|part| part.as_os_str() == "src");
    if in_src && lines > FILE_LINES_MAX {
        complaints.push(format!("{}: {lines} lines, {FILE_LINES_MAX} at most: split it", name.display()));
    }
    complaints
}

/// Diagrams, tables and addresses may be longer: they cannot be wrapped.
fn has_long_comment(line: &str) -> bool {
    let code = line.trim_start();
    let comment =
        if code.starts_with("//") { Some(code) } else { code.split_once(" // ").map(|(_, text)| text) };
    let cannot_be_wrapped = |text: &str| text.contains("://") || text.contains("   ") || text.contains("| ");
    line.chars().count() > COLUMNS_MAX && comment.is_some_and(|text| !cannot_be_wrapped(text))
}

/// Pages of the documentation that a file names.
fn cited_pages(text: &str) -> impl Iterator<Item = &str> {
    let is_end = |character: char| !(character.is_ascii_alphanumeric() || "/-_.".contains(character));
    let named = text.match_indices(concat!("do", "cs/")).map(move |(at, _)| {
        let rest = &text[at..];
        rest.split(is_end).next().unwrap_or(rest).trim_end_matches('.')
    });
    named.filter(|page| page.ends_with(".md"))
}

/// Each dependency owes a sentence, on its own line: what it does for us that we should not do ourselves.
fn check_manifest(text: &str) -> Vec<String> {
    let section =
        text.lines().enumerate().skip_while(|(_, line)| line.trim() != "[workspace.dependencies]").skip(1);
    let dependencies = section
        .take_while(|(_, line)| !line.starts_with('['))
        .filter(|(_, line)| line.contains('=') && !line.starts_with('#') && !line.contains("path = "));
    dependencies
        .filter(|(_, line)| line.split_once(" #").is_none_or(|(_, reason)| reason.trim().is_empty()))
        .map(|(index, line)| {
            let name = line.split('=').next().unwrap_or_default().trim();
            format!("Cargo.toml:{}: the dependency {name} owes its reason: a comment on its line", index + 1)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_unfinished_code_is_reported_with_its_line() {
        for word in UNFINISHED {
            let text = format!("fn f() {{\n    {word}]\n}}\n");
            let found = check_source(Path::new("crates/wire/tests/t.rs"), &text);
            assert_eq!(found.len(), 1);
            assert!(found[0].starts_with("crates/wire/tests/t.rs:2: "), "{found:?}");
        }
    }

    #[test]
    fn a_reason_for_unsafe_that_is_found_elsewhere_is_reported() {
        for reason in REFERRING {
            let found = check_source(Path::new("crates/wire/src/t.rs"), &format!("\n// {reason}\n"));
            assert_eq!(found, ["crates/wire/src/t.rs:2: write the reason for `unsafe` out"]);
        }
    }

    #[test]
    fn file_that_is_too_long_is_reported_in_src_only() {
        let text = "\n".repeat(FILE_LINES_MAX + 1);
        assert_eq!(check_source(Path::new("crates/wire/src/lib.rs"), &text).len(), 1);
        assert!(check_source(Path::new("crates/wire/tests/t.rs"), &text).is_empty());
        assert!(check_source(Path::new("crates/wire/src/lib.rs"), &text[1..]).is_empty());
    }

    #[test]
    fn comments_that_are_too_long_are_reported_unless_they_cannot_be_wrapped() {
        let words = "word ".repeat(30);
        let long = [format!("    /// {words}"), format!("let x = 1; // {words}")];
        assert!(long.iter().all(|line| has_long_comment(line)));
        let url = format!("// https://{}", "x".repeat(200));
        let table = format!("//! | {words} | {words} |");
        let fine = [url, table, format!("let x = \"{words}\";"), "// short".into()];
        assert!(!fine.iter().any(|line| has_long_comment(line)));
        assert_eq!(check_source(Path::new("crates/wire/src/lib.rs"), &long.join("\n")).len(), 2);
    }

    #[test]
    fn pages_are_found_wherever_a_comment_names_them() {
        let folder = concat!("do", "cs/");
        let text = format!(
            "//! As `{folder}src/a-b.md` says ({folder}c.md), and {folder}bench.\n// {folder}d.md.\n"
        );
        let found: Vec<&str> = cited_pages(&text).collect();
        assert_eq!(found, [format!("{folder}src/a-b.md"), format!("{folder}c.md"), format!("{folder}d.md")]);
    }

    #[test]
    fn dependency_without_a_reason_is_reported() {
        let text = "[workspace]\nresolver = \"3\"\n[workspace.dependencies]\nfarpool-wire = { path = \"x\" }\n\
            # A heading.\nlibc = \"0.2\" # system calls\nserde = \"1\"\nredb = \"4\" #\n[profile.dev]\nopt-level = 1\n";
        let found = check_manifest(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("Cargo.toml:7: the dependency serde"), "{found:?}");
        assert!(found[1].contains("redb"), "{found:?}");
    }

    #[test]
    fn this_workspace_can_be_read() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        check(root).unwrap();
    }
}
