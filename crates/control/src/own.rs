//! Folders and files of this user that no other user of the machine can change, lock or replace.
//!
//! O1. Only its owner can open a file made here. So no other user can lock it: `flock` works on any file that
//!     a process can open.
//! O2. A folder is our own if no other user can change it or any folder above it: a user that can rename a
//!     folder on the way decides what the path means. A sticky bit makes folders above it harmless, since
//!     only owners rename and remove what lies there.
//! O3. Directly in a folder with the sticky bit, such as `/tmp`, a file is ours as soon as it exists, since
//!     no other user can open, rename or remove it. But another user may have made a file of that name first.
//!     So a file opened there is checked by its descriptor: it must be a regular file and no link, belong to
//!     us, have no other name (another user may link to a file that we have elsewhere), and be closed to
//!     other users.
//! O4. O3 is not enough for a socket. A socket ends with its process; another user may then bind one of the
//!     same name, and the clients of the ended process connect to it. O3 is not enough, either, for a folder
//!     that is to hold files of fixed names. Both must lie in a folder of our own.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// Mode of folders: only the owner has access.
const FOLDER_MODE: u32 = 0o700;
/// Mode of files: only the owner has access.
const FILE_MODE: u32 = 0o600;
/// The mode bits that let users other than the owner change a folder. Access lists (acl(5)) show up in the
/// group's bits.
const CHANGED_BY_OTHERS: u32 = 0o022;
/// The bit with which only owners rename and remove what lies in a folder.
const STICKY: u32 = 0o1000;
/// The advice for a place that is not ours.
const FIX: &str = "use a folder of your own";

/// What other users can do in a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Others {
    /// Nothing.
    Nothing,
    /// Add their own files, but not change those of others (O3).
    Add,
}

/// The folder that holds a path.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Checks that only this user and root can change what lies in a folder, or add to it.
///
/// # Errors
/// When another user can, with the remedy; or when the folder cannot be examined.
pub fn check_folder(folder: &Path) -> io::Result<()> {
    match others_in(folder)? {
        Others::Nothing => Ok(()),
        Others::Add => refuse(format!("other users may put files into {}: {FIX} in it", folder.display())),
    }
}

fn others_in(folder: &Path) -> io::Result<Others> {
    let whole = folder.canonicalize()?;
    let mut others = Others::Nothing;
    for (above, folder) in whole.ancestors().enumerate() {
        let found = std::fs::metadata(folder)?;
        let place = folder.display();
        if found.uid() != 0 && found.uid() != geteuid().as_raw() {
            return refuse(format!("user {} may change {place}: {FIX}", found.uid()));
        }
        match (found.mode() & CHANGED_BY_OTHERS != 0, found.mode() & STICKY != 0) {
            (true, false) if found.uid() == geteuid().as_raw() => {
                return refuse(format!("other users may change {place}: {FIX}, or chmod go-w {place}"));
            }
            (true, false) => return refuse(format!("other users may change {place}: {FIX}")),
            (true, true) if above == 0 => others = Others::Add,
            _ => {}
        }
    }
    Ok(others)
}

fn refuse<T>(text: String) -> io::Result<T> {
    Err(io::Error::new(ErrorKind::PermissionDenied, text))
}

/// Makes a folder, and missing ones above it, for this user alone. A folder that exists must be our own.
///
/// # Errors
/// As [`check_folder`], or when it cannot be made.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.exists() && !folder.is_dir() {
        let text = format!("{} is a file, not a folder: name a folder", folder.display());
        return Err(io::Error::new(ErrorKind::NotADirectory, text));
    }
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)?;
    check_folder(folder)
}

/// Opens a file to read and write, and makes it if there is none: in a folder of our own, or directly in one
/// with the sticky bit (O3). For a file of an earlier release, call [`keep_private`] as well.
///
/// # Errors
/// As [`check_folder`], or when it cannot be opened, or another user may have put it there.
pub fn open_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
    if others_in(folder_of(path))? == Others::Nothing {
        return options.open(path);
    }
    // The system itself may refuse to open what others have put there (`fs.protected_regular`).
    let opened = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path);
    let file = opened.map_err(|error| {
        let text = format!("{error}; other users may put files beside {}: {FIX}", path.display());
        io::Error::new(error.kind(), text)
    })?;
    check_alone(path, &file)?;
    Ok(file)
}

/// Checks that a file is ours alone (O3), in a folder to which other users may add files.
fn check_alone(path: &Path, file: &File) -> io::Result<()> {
    let found = file.metadata()?;
    let place = path.display();
    let owner = found.uid();
    match () {
        () if !found.is_file() => {
            refuse(format!("{place} is not a file, and other users may have put it there: {FIX}"))
        }
        () if owner != geteuid().as_raw() => refuse(format!("{place} belongs to user {owner}: {FIX}")),
        () if found.nlink() != 1 => {
            refuse(format!("{place} has another name (a hard link), maybe made by another user: {FIX}"))
        }
        () if found.mode() & 0o777 & !FILE_MODE != 0 => {
            refuse(format!("other users may open {place}: {FIX}, or chmod 600 {place}"))
        }
        () => Ok(()),
    }
}

/// Makes a file private that an earlier release made readable for all users.
///
/// # Errors
/// When it is not our own.
pub fn keep_private(file: &File) -> io::Result<()> {
    if file.metadata()?.mode() & 0o777 & !FILE_MODE == 0 {
        return Ok(());
    }
    file.set_permissions(Permissions::from_mode(FILE_MODE))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn files_and_folders_are_created_for_their_owner_only() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a/b");
        make_folder(&folder).unwrap();
        let file = open_file(&folder.join("lock")).unwrap();
        assert_eq!((mode(&folder), mode(&folder.join("lock"))), (0o700, 0o600));
        file.set_permissions(Permissions::from_mode(0o644)).unwrap();
        keep_private(&open_file(&folder.join("lock")).unwrap()).unwrap();
        assert_eq!(mode(&folder.join("lock")), 0o600);
    }

    #[test]
    fn a_file_in_place_of_a_folder_is_refused_by_its_name() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("file");
        std::fs::write(&path, "").unwrap();
        let error = make_folder(&path).unwrap_err().to_string();
        assert!(error.contains("not a folder") && error.contains(path.to_str().unwrap()), "{error}");
    }

    fn sticky_folder(parent: &Path) -> PathBuf {
        let sticky = parent.join("sticky");
        std::fs::create_dir(&sticky).unwrap();
        std::fs::set_permissions(&sticky, Permissions::from_mode(0o1777)).unwrap();
        sticky
    }

    #[test]
    fn a_folder_that_others_may_change_is_refused_with_the_fix_and_one_below_a_sticky_folder_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let (open, sticky) = (parent.path().join("open"), sticky_folder(parent.path()));
        std::fs::create_dir_all(open.join("inner")).unwrap();
        std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        let error = check_folder(&open).unwrap_err().to_string();
        assert!(error.contains("chmod go-w") && error.contains(open.to_str().unwrap()), "{error}");
        assert!(open_file(&open.join("file")).is_err());
        assert!(check_folder(&open.join("inner")).is_err(), "the folder above can be renamed");
        let error = check_folder(&sticky).unwrap_err().to_string();
        assert!(
            error.contains(FIX) && !error.contains("chmod"),
            "the fix must not be to chmod /tmp: {error}"
        );
        make_folder(&sticky.join("inner")).unwrap();
        open_file(&sticky.join("inner/file")).unwrap();
    }

    #[test]
    fn a_file_of_our_own_directly_in_a_sticky_folder_is_made_and_found_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = sticky_folder(parent.path()).join("store");
        open_file(&path).unwrap().write_all(b"kept").unwrap();
        assert_eq!(mode(&path), 0o600);
        let mut found = String::new();
        open_file(&path).unwrap().read_to_string(&mut found).unwrap();
        assert_eq!(found, "kept");
    }

    #[test]
    fn a_file_that_another_user_may_have_made_in_a_sticky_folder_is_refused_and_not_touched() {
        let parent = tempfile::tempdir().unwrap();
        let sticky = sticky_folder(parent.path());
        let precious = parent.path().join("precious");
        std::fs::write(&precious, "precious").unwrap();
        std::fs::set_permissions(&precious, Permissions::from_mode(0o600)).unwrap();
        let refused = |name: &str, reason: &str| {
            let error = open_file(&sticky.join(name)).unwrap_err().to_string();
            assert!(error.contains(FIX) && error.contains(reason), "{name}: {error}");
        };
        symlink(&precious, sticky.join("link")).unwrap();
        refused("link", "put files beside");
        symlink(parent.path().join("nowhere"), sticky.join("dangling")).unwrap();
        refused("dangling", "put files beside");
        assert!(!parent.path().join("nowhere").exists());
        std::fs::hard_link(&precious, sticky.join("linked")).unwrap();
        refused("linked", "another name");
        std::fs::write(sticky.join("open"), "").unwrap();
        std::fs::set_permissions(sticky.join("open"), Permissions::from_mode(0o644)).unwrap();
        refused("open", "chmod 600");
        let fifo = sticky.join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        refused("fifo", "not a file");
        std::fs::create_dir(sticky.join("folder")).unwrap();
        refused("folder", "put files beside");
        if geteuid().is_root() {
            // Only root can give files away.
            let theirs = sticky.join("theirs");
            drop(open_file(&theirs).unwrap());
            std::os::unix::fs::chown(&theirs, Some(65_534), None).unwrap();
            refused("theirs", ""); // the system itself may refuse first
        }
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        if !geteuid().is_root() {
            return; // only root can give folders away
        }
        let theirs = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(theirs.path(), Some(65_534), None).unwrap();
        let error = check_folder(theirs.path()).unwrap_err().to_string();
        assert!(error.contains("user 65534"), "{error}");
    }

    #[test]
    fn a_bare_name_lies_in_the_current_folder() {
        assert_eq!(folder_of(Path::new("broker.redb")), Path::new("."));
        assert_eq!(folder_of(Path::new("/run/x")), Path::new("/run"));
    }
}
