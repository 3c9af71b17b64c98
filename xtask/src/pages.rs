//! Rules for the documentation: links to files lead somewhere (places within a page are not checked), and
//! each page is in the book.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::files::{read, with_extension};

/// Pages beside those of the book.
const OTHER_PAGES: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "testbed/README.md"];
const BOOK: &str = "docs";
const CONTENTS: &str = "docs/SUMMARY.md";

/// Checks all pages of the workspace in the folder `root`.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut pages: BTreeSet<PathBuf> = OTHER_PAGES.iter().map(PathBuf::from).collect();
    let of_the_book = with_extension(&root.join(BOOK), "md")?;
    pages.extend(of_the_book.iter().filter_map(|page| page.strip_prefix(root).ok()).map(Path::to_path_buf));
    let mut complaints = Vec::new();
    for page in &pages {
        let text = read(&root.join(page))?;
        let folder = page.parent().unwrap_or(Path::new(""));
        let lost = links(&text).filter(|link| !root.join(folder).join(link).exists());
        complaints.extend(lost.map(|link| format!("{}: the link {link} leads nowhere", page.display())));
    }
    let contents = read(&root.join(CONTENTS))?;
    let listed: BTreeSet<PathBuf> = links(&contents).map(|link| Path::new(BOOK).join(link)).collect();
    let of_the_book = pages.iter().filter(|page| page.starts_with(BOOK) && *page != Path::new(CONTENTS));
    let missing = of_the_book.filter(|page| !listed.contains(*page));
    complaints.extend(missing.map(|page| format!("{}: not in {CONTENTS}", page.display())));
    Ok(complaints)
}

/// The files of this repository to which a page links, without the places in them. A link may be broken over
/// two lines in its text, never in its address.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let addresses =
        text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(address, _)| address);
    let files = addresses.map(|address| address.split_once('#').map_or(address, |(file, _)| file));
    files.filter(|file| !file.is_empty() && !file.contains("://") && !file.contains(char::is_whitespace))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn links_to_files_are_found_and_those_to_places_and_other_hosts_are_not() {
        let text = "[a](a.md) [b\nc](../b.md#c), [d](#d) [e](https://example.org/e.md) `f](g h)`";
        assert_eq!(links(text).collect::<Vec<_>>(), ["a.md", "../b.md"]);
    }

    #[test]
    fn a_broken_link_and_a_page_outside_the_book_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        OTHER_PAGES.iter().for_each(|page| write(page, "[contents](docs/SUMMARY.md)"));
        write("testbed/README.md", "[contents](../docs/SUMMARY.md)");
        write(CONTENTS, "[one](src/one.md)");
        // In halves: another rule looks in this file for pages that do not exist.
        write(concat!("do", "cs/src/one.md"), "[two](two.md)");
        write(concat!("do", "cs/src/two.md"), "[three](three.md)");
        let complaints = check(root.path()).unwrap();
        assert_eq!(
            complaints,
            [
                concat!("do", "cs/src/two.md: the link three.md leads nowhere"),
                concat!("do", "cs/src/two.md: not in do", "cs/SUMMARY.md")
            ]
        );
    }
}
