//! Extended attributes that are computed instead of kept: the redundancy of a file, and the state of the
//! whole mount.
//!
//! | attribute | of | read | write |
//! |---|---|---|---|
//! | `user.farpool.redundancy` | a file | its redundancy | chooses it; EBUSY unless the file is empty |
//! | `user.farpool.redundancy` | a directory | as written (an attribute like others) | sets that of files and directories made in it from now on |
//! | `user.farpool.volume` | the root | the state as JSON | |
//! | `user.farpool.rebuild`, `user.farpool.scrub` | the root | | starts it, in the background |

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::SystemTime;

use farpool_file::{FileError, Progress, Redundancy, VolumeStatus};
use fuser::Errno;

use super::{FarFs, Outcome};
use crate::body::Body;
use crate::namespace::{Ino, Kind, Namespace, XattrMode};

/// Other names with this prefix are refused.
const OURS: &[u8] = b"user.farpool.";
const REDUNDANCY: &str = "user.farpool.redundancy";
const VOLUME: &str = "user.farpool.volume";
const REBUILD: &str = "user.farpool.rebuild";
const SCRUB: &str = "user.farpool.scrub";

impl FarFs {
    /// The value of an attribute that is computed instead of kept.
    pub(super) fn answered(&self, ino: Ino, name: &OsStr) -> Outcome<Option<Vec<u8>>> {
        if name == REDUNDANCY
            && let Some(body) = self.stat(ino)?.body()
        {
            return Ok(Some(body.far.redundancy().to_string().into_bytes()));
        }
        if name == VOLUME && ino == Ino::ROOT {
            return Ok(Some(json(&self.store.volume_status(), self.redundancy).into_bytes()));
        }
        Ok(None)
    }

    /// Carries out the setting of a computed attribute. False: the attribute is one that is kept.
    pub(super) fn obeyed(&self, ino: Ino, name: &OsStr, value: &[u8]) -> Outcome<bool> {
        if name == REDUNDANCY {
            let redundancy = parse(value).ok_or(Errno::EINVAL)?;
            let stat = self.stat(ino)?;
            return match stat.body() {
                Some(body) if body.far.set_redundancy(redundancy) => Ok(true),
                Some(_) => Err(Errno::EBUSY.into()),
                None => Ok(false),
            };
        }
        if !name.as_bytes().starts_with(OURS) {
            return Ok(false);
        }
        if ino == Ino::ROOT && name == REBUILD {
            self.store.start_rebuild();
        } else if ino == Ino::ROOT && name == SCRUB {
            self.store.start_scrub();
        } else if ino == Ino::ROOT && name == VOLUME {
            return Err(Errno::EPERM.into());
        } else {
            return Err(Errno::EINVAL.into()); // an attribute that is only kept would seem to have an effect
        }
        Ok(true)
    }

    /// The redundancy of files that are made in a directory.
    pub(super) fn redundancy_in(&self, parent: Ino) -> Outcome<Redundancy> {
        let names = self.names()?;
        let chosen = names.xattr(parent, OsStr::new(REDUNDANCY)).ok().and_then(parse);
        Ok(chosen.unwrap_or(self.redundancy))
    }
}

/// A new directory inherits the redundancy that was chosen for its parent.
pub(super) fn inherit(names: &mut Namespace<Arc<Body>>, parent: Ino, child: Ino) -> Outcome<()> {
    let name = OsStr::new(REDUNDANCY);
    let Ok(chosen) = names.xattr(parent, name).map(<[u8]>::to_vec) else { return Ok(()) };
    Ok(names.set_xattr(child, name, &chosen, XattrMode::Set, SystemTime::now())?)
}

/// Whether a new inode is a directory.
pub(super) fn is_directory(kind: &Kind<Arc<Body>>) -> bool {
    matches!(kind, Kind::Directory)
}

fn parse(value: &[u8]) -> Option<Redundancy> {
    OsStr::from_bytes(value).to_str()?.trim_end().parse().ok()
}

fn json(status: &VolumeStatus, redundancy: Redundancy) -> String {
    let progress = |progress: &Progress, more: &str| {
        let Progress { running, total, done, finished, attempts } = progress;
        format!(
            "{{\"running\":{running},\"blocks_total\":{total},\"blocks_done\":{done},\"finished\":{finished},\
             \"attempts\":{attempts},{more}}}"
        )
    };
    let waits_for = status.rebuild_waits_for.map_or("null".to_owned(), |error| quoted(&waits_for(error)));
    let VolumeStatus { files, redundant_files, extents, missing_extents, lost_extents, .. } = status;
    let VolumeStatus { wrong_blocks, repaired_blocks, lost_blocks, hedged_reads, to_rebuild, .. } = status;
    format!(
        "{{\"redundancy\":\"{redundancy}\",\"files\":{files},\"redundant_files\":{redundant_files},\
         \"extents\":{extents},\"missing_extents\":{missing_extents},\
         \"lost_extents\":{lost_extents},\"to_rebuild\":{to_rebuild},\
         \"wrong_blocks\":{wrong_blocks},\"mended_blocks\":{repaired_blocks},\"lost_blocks\":{lost_blocks},\
         \"hedged_reads\":{hedged_reads},\
         \"rebuild\":{},\"scrub\":{},\"direct_read_bytes\":{},\"direct_written_bytes\":{},\
         \"overflow_bytes\":{}}}",
        progress(&status.rebuild, &format!("\"waits_for\":{waits_for}")),
        progress(&status.scrub, &format!("\"blocks_unread\":{}", status.unread_blocks)),
        status.direct.read,
        status.direct.written,
        status.overflow_bytes.map_or("null".to_owned(), |bytes| bytes.to_string())
    )
}

/// What a rebuild waits for, as a continuation of "it waits: ".
fn waits_for(error: FileError) -> String {
    match error {
        FileError::TooFewNodes { wanted, found } => {
            format!("rows need {wanted} nodes with room, there are {found}")
        }
        FileError::NoSpace => "there is no room on nodes that hold nothing else of the same rows".to_owned(),
        other => other.to_string(),
    }
}

/// A JSON string. The texts passed to it have no control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
