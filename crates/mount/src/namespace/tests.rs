use std::ffi::OsStr;
use std::time::{Duration, SystemTime};

use super::*;

const OWN: Ownership = Ownership { mode: 0o644, uid: 1000, gid: 1000 };

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn name(text: &str) -> &OsStr {
    OsStr::new(text)
}

fn empty() -> Namespace<&'static str> {
    Namespace::new(Ownership { mode: 0o755, uid: 0, gid: 0 }, at(0), MAX_INODES)
}

/// A file as the kernel makes one: the kernel knows it, and it is not open yet.
fn file(space: &mut Namespace<&'static str>, parent: Ino, text: &'static str) -> Ino {
    let ino = space.make(parent, name(text), Kind::File(text), OWN, at(1)).unwrap();
    space.remember(ino).unwrap();
    ino
}

fn directory(space: &mut Namespace<&'static str>, parent: Ino, text: &str) -> Ino {
    space.make(parent, name(text), Kind::Directory, OWN, at(1)).unwrap()
}

fn nlink(space: &Namespace<&'static str>, ino: Ino) -> u32 {
    space.attributes(ino).unwrap().nlink
}

fn names(space: &Namespace<&'static str>, ino: Ino, cookie: u64) -> Vec<String> {
    let entries = space.entries(ino, cookie).unwrap();
    entries.map(|entry| entry.name.to_str().unwrap().to_owned()).collect()
}

#[test]
fn an_unlinked_open_file_ends_with_the_last_of_forget_and_release() {
    for forget_first in [true, false] {
        let mut space = empty();
        let ino = file(&mut space, Ino::ROOT, "a");
        assert_eq!(space.open(ino), Ok(&"a"));
        assert_eq!(space.unlink(Ino::ROOT, name("a"), at(2)), Ok(None));
        assert_eq!(space.find(Ino::ROOT, name("a")), Err(NamespaceError::NotFound));
        assert_eq!(nlink(&space, ino), 0);
        let (first, last) = if forget_first {
            (space.forget(ino, 1), space.release(ino))
        } else {
            (space.release(ino), space.forget(ino, 1))
        };
        assert_eq!((first, last), (None, Some("a")));
        assert_eq!(space.inodes(), 1);
    }
}

#[test]
fn a_file_with_a_name_survives_being_forgotten() {
    let mut space = empty();
    let ino = file(&mut space, Ino::ROOT, "a");
    assert_eq!(space.forget(ino, 1), None);
    assert_eq!(space.find(Ino::ROOT, name("a")), Ok(ino));
    assert_eq!(space.unlink(Ino::ROOT, name("a"), at(2)), Ok(Some("a")));
}

#[test]
fn renaming_over_a_file_ends_it_and_keeps_one_name() {
    let mut space = empty();
    let (old, new) = (file(&mut space, Ino::ROOT, "old"), file(&mut space, Ino::ROOT, "new"));
    assert_eq!(space.forget(old, 1), None);
    let ended = space.rename((Ino::ROOT, name("new")), (Ino::ROOT, name("old")), RenameMode::Replace, at(2));
    assert_eq!(ended, Ok(Some("old")));
    assert_eq!(space.find(Ino::ROOT, name("old")), Ok(new));
    assert_eq!(names(&space, Ino::ROOT, 0), [".", "..", "old"]);
    assert_eq!(nlink(&space, new), 1);
}

#[test]
fn renaming_one_name_of_a_file_onto_another_leaves_both() {
    let mut space = empty();
    let ino = file(&mut space, Ino::ROOT, "a");
    space.link(ino, Ino::ROOT, name("b"), at(2)).unwrap();
    let ended = space.rename((Ino::ROOT, name("a")), (Ino::ROOT, name("b")), RenameMode::Replace, at(3));
    assert_eq!(ended, Ok(None));
    assert_eq!(names(&space, Ino::ROOT, 0), [".", "..", "a", "b"]);
    assert_eq!(nlink(&space, ino), 2);
}

#[test]
fn a_directory_never_moves_into_itself() {
    let mut space = empty();
    let outer = directory(&mut space, Ino::ROOT, "outer");
    let inner = directory(&mut space, outer, "inner");
    for mode in [RenameMode::Replace, RenameMode::NoReplace] {
        let moved = space.rename((Ino::ROOT, name("outer")), (inner, name("x")), mode, at(2));
        assert_eq!(moved, Err(NamespaceError::Invalid));
    }
    let swapped =
        space.rename((outer, name("inner")), (Ino::ROOT, name("outer")), RenameMode::Exchange, at(2));
    assert_eq!(swapped, Err(NamespaceError::Invalid));
    assert_eq!((nlink(&space, Ino::ROOT), nlink(&space, outer)), (3, 3));
}

#[test]
fn exchanging_a_file_and_a_directory_moves_link_counts_with_them() {
    let mut space = empty();
    let (left, right) = (directory(&mut space, Ino::ROOT, "l"), directory(&mut space, Ino::ROOT, "r"));
    let (inner, plain) = (directory(&mut space, left, "x"), file(&mut space, right, "x"));
    space.rename((left, name("x")), (right, name("x")), RenameMode::Exchange, at(2)).unwrap();
    assert_eq!((space.find(left, name("x")), space.find(right, name("x"))), (Ok(plain), Ok(inner)));
    assert_eq!((nlink(&space, left), nlink(&space, right)), (2, 3));
    assert_eq!(space.entries(inner, 1).unwrap().next().unwrap().ino, right);
}

#[test]
fn only_an_empty_directory_is_removed_and_nothing_is_made_in_it_afterwards() {
    let mut space = empty();
    let gone = directory(&mut space, Ino::ROOT, "d");
    space.remember(gone).unwrap();
    file(&mut space, gone, "f");
    assert_eq!(space.rmdir(Ino::ROOT, name("d"), at(2)), Err(NamespaceError::NotEmpty));
    assert_eq!(space.unlink(Ino::ROOT, name("d"), at(2)), Err(NamespaceError::IsADirectory));
    let _ = space.unlink(gone, name("f"), at(2)).unwrap();
    space.rmdir(Ino::ROOT, name("d"), at(2)).unwrap();
    let made = space.make(gone, name("late"), Kind::File("late"), OWN, at(3));
    assert_eq!(made, Err(NamespaceError::NotFound));
    assert_eq!(nlink(&space, Ino::ROOT), 2);
}

#[test]
fn a_listing_that_stopped_finds_the_rest_once_after_removals_and_additions() {
    let mut space = empty();
    for text in ["a", "b", "c", "d"] {
        file(&mut space, Ino::ROOT, text);
    }
    let stopped_at = space.entries(Ino::ROOT, 0).unwrap().find(|entry| entry.name == "b").unwrap().cookie;
    let _ = space.unlink(Ino::ROOT, name("a"), at(2)).unwrap();
    let _ = space.unlink(Ino::ROOT, name("c"), at(2)).unwrap();
    file(&mut space, Ino::ROOT, "a");
    assert_eq!(names(&space, Ino::ROOT, stopped_at), ["d", "a"]);
    assert_eq!(names(&space, Ino::ROOT, 1), ["..", "b", "d", "a"]);
}

#[test]
fn a_set_group_id_directory_hands_down_its_group() {
    let mut space = empty();
    let shared = directory(&mut space, Ino::ROOT, "shared");
    space.change(shared, Change { mode: Some(0o2775), gid: Some(7), ..Change::default() }, at(2)).unwrap();
    let (plain, inner) = (file(&mut space, shared, "f"), directory(&mut space, shared, "d"));
    let own = |ino| space.attributes(ino).unwrap().ownership;
    assert_eq!((own(plain).gid, own(plain).mode), (7, 0o644));
    assert_eq!((own(inner).gid, own(inner).mode), (7, 0o2644));
}

#[test]
fn limits_refuse_and_change_nothing() {
    let mut space: Namespace<&str> = Namespace::new(OWN, at(0), 3);
    let first = file(&mut space, Ino::ROOT, "a");
    file(&mut space, Ino::ROOT, "b");
    let made = space.make(Ino::ROOT, name("c"), Kind::File("c"), OWN, at(1));
    assert_eq!(made, Err(NamespaceError::Full));
    space.link(first, Ino::ROOT, name("c"), at(1)).unwrap();
    assert_eq!(space.link(first, Ino::ROOT, name("d"), at(1)), Err(NamespaceError::Full));
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    assert_eq!(space.find(Ino::ROOT, name(&long)), Err(NamespaceError::NameTooLong));
    assert_eq!(names(&space, Ino::ROOT, 0), [".", "..", "a", "b", "c"]);
}

#[test]
fn writing_moves_modified_and_changed_and_never_turns_changed_back() {
    let mut space = empty();
    let ino = file(&mut space, Ino::ROOT, "a");
    space.change(ino, Change { modified: Some(at(5)), ..Change::default() }, at(9)).unwrap();
    space.written(ino, at(7)).unwrap();
    let times = space.attributes(ino).unwrap().times;
    assert_eq!((times.accessed, times.modified, times.changed), (at(1), at(7), at(9)));
}

#[test]
fn what_attributes_take_is_counted_until_they_or_their_inode_end() {
    let mut space = empty();
    let ino = file(&mut space, Ino::ROOT, "a");
    let mut set = |text: &str, value: &[u8], mode| space.set_xattr(ino, name(text), value, mode, at(2));
    assert_eq!(set("user.a", &[1; 100], XattrMode::Create), Ok(()));
    assert_eq!(set("user.b", &[1; 1000], XattrMode::Set), Ok(()));
    assert_eq!(set("user.a", &[1; 10], XattrMode::Replace), Ok(()));
    assert_eq!(set("user.a", &[1; 65_537], XattrMode::Set), Err(NamespaceError::AttributeTooLarge));
    assert_eq!(space.xattr(ino, name("user.a")), Ok([1; 10].as_slice()));
    let both = space.xattr_bytes;
    space.remove_xattr(ino, name("user.b"), at(3)).unwrap();
    assert!(space.xattr_bytes > 0 && both - space.xattr_bytes > 1000);
    assert_eq!(space.unlink(Ino::ROOT, name("a"), at(4)), Ok(None));
    assert_eq!(space.forget(ino, 1), Some("a"));
    assert_eq!(space.xattr_bytes, 0);
}

#[test]
fn a_new_owner_gets_a_file_without_its_privileges_and_a_directory_with_them() {
    let mut space = empty();
    let (plain, shared) = (file(&mut space, Ino::ROOT, "f"), directory(&mut space, Ino::ROOT, "d"));
    for (ino, left) in [(plain, 0o771), (shared, 0o6771)] {
        space.change(ino, Change { mode: Some(0o6771), ..Change::default() }, at(2)).unwrap();
        space.change(ino, Change { uid: Some(7), ..Change::default() }, at(3)).unwrap();
        assert_eq!(space.attributes(ino).unwrap().ownership.mode, left);
    }
}

const HOST: u32 = 1000;
const GUEST: u32 = 2000;

/// A namespace with a budget of `bytes`.
fn bounded(bytes: usize) -> Namespace<&'static str> {
    let mut space = Namespace::new(Ownership { mode: 0o777, uid: HOST, gid: 0 }, at(0), MAX_INODES);
    space.limit_to(Budget { bytes, host: HOST });
    space
}

fn of(uid: u32) -> Ownership {
    Ownership { mode: 0o644, uid, gid: 0 }
}

/// Makes files until one is refused; returns how many were made, and the error.
fn fill(space: &mut Namespace<&'static str>, uid: u32, prefix: &str) -> (usize, NamespaceError) {
    for number in 0.. {
        let name = OsString::from(format!("{prefix}{number}"));
        if let Err(error) = space.make(Ino::ROOT, &name, Kind::File(""), of(uid), at(1)) {
            return (number, error);
        }
    }
    unreachable!()
}

#[test]
fn names_are_bounded_in_all_and_for_each_user_and_removing_them_makes_room() {
    let mut space = bounded(1 << 20);
    let (of_guest, error) = fill(&mut space, GUEST, "guest");
    assert_eq!(error, NamespaceError::OverShare);
    assert!((150..(1 << 18) / INODE_BYTES).contains(&of_guest), "{of_guest}");
    let (of_another, error) = fill(&mut space, GUEST + 1, "another");
    assert_eq!((of_another.abs_diff(of_guest) < 10, error), (true, NamespaceError::OverShare));
    let (of_host, error) = fill(&mut space, HOST, "host");
    assert_eq!(error, NamespaceError::Full);
    assert!(of_host > of_guest, "{of_host}");
    assert_eq!(fill(&mut space, 0, "root"), (0, NamespaceError::Full));
    space.check_account();
    let _body = space.unlink(Ino::ROOT, OsStr::new("guest0"), at(2)).unwrap();
    assert_eq!(fill(&mut space, GUEST + 1, "more").1, NamespaceError::OverShare);
    assert_eq!(fill(&mut space, GUEST, "again").0, 1);
    space.check_account();
}

#[test]
fn links_targets_and_extended_attributes_are_charged_to_the_owner_of_the_inode() {
    let mut space = bounded(1 << 20);
    let share = (1 << 20) / 4;
    let file = space.make(Ino::ROOT, OsStr::new("file"), Kind::File(""), of(GUEST), at(1)).unwrap();
    let value = vec![0; 60 << 10];
    let set = |space: &mut Namespace<_>, name: &str| {
        space.set_xattr(file, OsStr::new(name), &value, XattrMode::Set, at(1))
    };
    for name in ["user.a", "user.b", "user.c", "user.d", "user.a"] {
        set(&mut space, name).unwrap();
    }
    let link = |space: &mut Namespace<_>, number: usize| {
        space.link(file, Ino::ROOT, OsStr::new(&format!("{number:0200}")), at(1))
    };
    let links = (0..).find(|number| link(&mut space, *number).is_err()).unwrap();
    assert_eq!(link(&mut space, links), Err(NamespaceError::OverShare));
    assert!(links < share / 200, "{links}");
    let target = Kind::Symlink(OsString::from("x".repeat(4000)));
    let refused = space.make(Ino::ROOT, OsStr::new("symlink"), target, of(GUEST), at(1));
    assert_eq!(refused, Err(NamespaceError::OverShare));
    // After `chown`, the new owner is charged for everything.
    let change = Change { uid: Some(GUEST + 1), ..Change::default() };
    space.change(file, change, at(2)).unwrap();
    space.check_account();
    assert_eq!(link(&mut space, links), Err(NamespaceError::OverShare));
    space.remove_xattr(file, OsStr::new("user.b"), at(3)).unwrap();
    link(&mut space, links).unwrap();
    assert!(fill(&mut space, GUEST, "file").0 > 100);
    space.check_account();
}
