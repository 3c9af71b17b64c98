//! Folders and files of this user that no other user of the machine can change, lock or replace.
//!
//! O1. A file made here can be opened by nobody else, so that nobody else can lock it: `flock` asks for no right but that to open.
//! O2. A folder is our own when neither it nor any folder above it can be changed by somebody else: who can rename a folder on the
//!     way decides what its path means. A folder with the sticky bit above it is harmless (only owners rename what lies there); the
//!     folder itself must not have one, since anybody may put a file there before we do.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::process::geteuid;

/// Folders: for their owner alone.
const FOLDER_MODE: u32 = 0o700;
/// Files: for their owner alone.
const FILE_MODE: u32 = 0o600;
/// The bits by which others than the owner change a folder. A list of rights (acl(5)) shows in the group's.
const CHANGED_BY_OTHERS: u32 = 0o022;
/// Only owners rename and remove what lies in such a folder.
const STICKY: u32 = 0o1000;

/// The folder that holds a path.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether nobody but this user and root can change what lies in a folder.
///
/// # Errors
/// When somebody else can, with what mends it; or when the folder cannot be looked at.
pub fn check_folder(folder: &Path) -> io::Result<()> {
    let refuse = |text: String| Err(io::Error::new(ErrorKind::PermissionDenied, text));
    let whole = folder.canonicalize()?;
    for (above, folder) in whole.ancestors().enumerate() {
        let found = std::fs::metadata(folder)?;
        let place = folder.display();
        if found.uid() != 0 && found.uid() != geteuid().as_raw() {
            return refuse(format!("user {} may change {place}: use a folder of your own", found.uid()));
        }
        let is_harmless = above > 0 && found.mode() & STICKY != 0;
        if found.mode() & CHANGED_BY_OTHERS != 0 && !is_harmless {
            return refuse(format!(
                "other users may change {place}: use a folder of your own, or chmod go-w {place}"
            ));
        }
    }
    Ok(())
}

/// Makes a folder, and those above it that are missing, for this user alone; one that is there must be our own.
///
/// # Errors
/// As [`check_folder`], or when it cannot be made.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)?;
    check_folder(folder)
}

/// Opens a file in a folder of our own to read and write, and makes it if it is not there. See [`keep_private`] for one that was.
///
/// # Errors
/// As [`check_folder`], or when it cannot be opened.
pub fn open_file(path: &Path) -> io::Result<File> {
    check_folder(folder_of(path))?;
    File::options().read(true).write(true).create(true).truncate(false).mode(FILE_MODE).open(path)
}

/// Takes from others the right to open a file that an earlier release made for all to read.
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
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn what_is_made_is_for_its_owner_alone() {
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
    fn a_folder_that_others_may_change_is_refused_with_the_fix_and_one_below_a_sticky_folder_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let (open, sticky) = (parent.path().join("open"), parent.path().join("sticky"));
        for (folder, mode) in [(&open, 0o777), (&sticky, 0o1777)] {
            std::fs::create_dir_all(folder.join("inner")).unwrap();
            std::fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
            let error = check_folder(folder).unwrap_err().to_string();
            assert!(error.contains("chmod go-w") && error.contains(folder.to_str().unwrap()), "{error}");
            assert!(open_file(&folder.join("file")).is_err());
        }
        check_folder(&sticky.join("inner")).unwrap();
        assert!(check_folder(&open.join("inner")).is_err(), "the folder above can be renamed");
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        if !geteuid().is_root() {
            return; // only root gives folders away
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
