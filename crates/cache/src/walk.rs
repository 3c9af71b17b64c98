//! Walks through directories.

use std::fs::{DirEntry, ReadDir};
use std::path::Path;

/// Everything below a directory: a directory comes before what it contains. What cannot be read is left out,
/// and symbolic links are not followed.
pub fn entries_below(directory: &Path) -> impl Iterator<Item = DirEntry> + use<> {
    let (mut open, mut left): (Option<ReadDir>, _) = (None, vec![directory.to_owned()]);
    std::iter::from_fn(move || {
        loop {
            match open.as_mut().and_then(Iterator::next) {
                Some(Ok(entry)) => {
                    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        left.push(entry.path());
                    }
                    return Some(entry);
                }
                Some(Err(_)) => {}
                None => open = std::fs::read_dir(left.pop()?).ok(),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entry_is_found_once_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::create_dir(dir.path().join("c")).unwrap();
        std::fs::write(dir.path().join("a/b/file"), "").unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("c/link")).unwrap();
        let mut found: Vec<_> = entries_below(dir.path()).map(|entry| entry.path()).collect();
        found.sort_unstable();
        assert_eq!(found, ["a", "a/b", "a/b/file", "c", "c/link"].map(|path| dir.path().join(path)));
        assert_eq!(entries_below(&dir.path().join("none")).count(), 0);
    }
}
