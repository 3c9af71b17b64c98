//! What one daemon tells the other, as bytes.
//!
//! ```text
//! 0    "farpool\0"
//! 8    version                  8 bytes, little-endian, as all numbers
//! 16   length of the rest
//! 24   its CRC64-NVME
//! 32   the rest: a protobuf message (`Message`)
//! ```

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use farpool_keep::{Change, Kept};
use prost::Message as _;

use super::{HandedPage, HandedPages};
use crate::files::FileId;
use crate::postgres::Checkpoint;
use crate::rules::{Shipped, checksum};

const MAGIC: &[u8; 8] = b"farpool\0";
const VERSION: u64 = 1;
const HEAD_BYTES: usize = 32;

/// What the new daemon has to know: what is leased, what lies there, and of which server it is.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HandoverList {
    /// How the old server has ended.
    pub server: ServerEnd,
    /// How many slots the old index had.
    pub slots: u32,
    /// How many slots were to have memory.
    pub wanted_slots: u32,
    /// How many files the old index had room for.
    pub max_files: u32,
    /// The leases, as a later process of the same owner finds them (`farpool_pool::Pool::connect_keeping`).
    pub leases: Kept,
    /// Groups of slots with the numbers of their extents.
    pub groups: Vec<(u32, u64)>,
    /// The files with their pages.
    pub files: Vec<ListedFile>,
}

/// How a server has ended that shut down as a primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerEnd {
    /// Which database it is (`system_identifier`).
    pub system: u64,
    /// The checkpoint with which it has shut down.
    pub checkpoint: Checkpoint,
    /// The version of the checksums of its pages; 0: they have none.
    pub checksums: u32,
}

/// A file with its pages.
#[derive(Clone, PartialEq, Debug)]
pub struct ListedFile {
    /// Its path, from the server's data directory.
    pub path: PathBuf,
    /// They are in no order.
    pub pages: Vec<ListedPage>,
}

/// A page of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListedPage {
    /// Its block.
    pub block: u32,
    /// Where it lies.
    pub slot: u32,
    /// Its checksum.
    pub checksum: u64,
}

/// The reason for which bytes are no list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ListError {
    /// They begin with something else.
    #[error("this is not a list that `farpool cache handover` prints: connect the two commands by a pipe")]
    NotAList,
    /// Another version of the program made them.
    #[error("another version of farpool has printed the list: use the same version on both machines")]
    OtherVersion,
    /// Some of them are missing or damaged.
    #[error("the list is empty, incomplete or damaged: `farpool cache handover` says why, if it has failed")]
    Damaged,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(fixed64, tag = "1")]
    system: u64,
    #[prost(fixed64, tag = "2")]
    checkpoint: u64,
    #[prost(uint32, tag = "3")]
    timeline: u32,
    #[prost(uint32, tag = "4")]
    slots: u32,
    #[prost(fixed64, tag = "5")]
    checkpoint_time: u64,
    #[prost(uint32, tag = "6")]
    checksums: u32,
    #[prost(uint32, tag = "7")]
    wanted_slots: u32,
    #[prost(uint32, tag = "8")]
    max_files: u32,
    #[prost(message, repeated, tag = "9")]
    leases: Vec<LeaseRecord>,
    #[prost(message, repeated, tag = "10")]
    groups: Vec<Group>,
    #[prost(message, repeated, tag = "11")]
    files: Vec<FileMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseRecord {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct Group {
    #[prost(uint32, tag = "1")]
    group: u32,
    #[prost(uint64, tag = "2")]
    extent: u64,
}

/// The three lists have the same length.
#[derive(Clone, PartialEq, prost::Message)]
struct FileMessage {
    #[prost(bytes = "vec", tag = "1")]
    path: Vec<u8>,
    #[prost(uint32, repeated, tag = "2")]
    blocks: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    slots: Vec<u32>,
    #[prost(fixed64, repeated, tag = "4")]
    checksums: Vec<u64>,
}

impl HandoverList {
    /// How many pages there are.
    pub fn pages(&self) -> u64 {
        self.files.iter().map(|file| file.pages.len() as u64).sum()
    }

    /// Sorts pages into files. `path_of` gives the path of each file, or leaves the file out.
    pub(super) fn set_pages(&mut self, handed: HandedPages, path_of: impl Fn(FileId) -> Option<PathBuf>) {
        let file_of = |id| path_of(id).map(|path| ListedFile { path, pages: Vec::new() });
        let mut by_file: Vec<_> = handed.files.into_iter().map(file_of).collect();
        for HandedPage { file, block, slot, checksum } in handed.pages {
            if let Some(file) = &mut by_file[file as usize] {
                file.pages.push(ListedPage { block, slot, checksum });
            }
        }
        self.files = by_file.into_iter().flatten().filter(|file| !file.pages.is_empty()).collect();
    }

    /// The pages of those files for which `number_of` gives a number.
    pub(super) fn pages_of(&self, number_of: impl Fn(usize) -> Option<u32>) -> Vec<HandedPage> {
        let numbered = self.files.iter().enumerate();
        let numbered = numbered.filter_map(|(at, file)| Some((number_of(at)?, file)));
        numbered
            .flat_map(|(file, handed)| {
                let page =
                    move |&ListedPage { block, slot, checksum }| HandedPage { file, block, slot, checksum };
                handed.pages.iter().map(page)
            })
            .collect()
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let leases = self.leases.under(&[]);
        let message = Message {
            system: self.server.system,
            checkpoint: self.server.checkpoint.position,
            timeline: self.server.checkpoint.timeline,
            checkpoint_time: self.server.checkpoint.time,
            checksums: self.server.checksums,
            slots: self.slots,
            wanted_slots: self.wanted_slots,
            max_files: self.max_files,
            leases: leases.map(|(key, value)| LeaseRecord { key: key.into(), value: value.into() }).collect(),
            groups: self.groups.iter().map(|&(group, extent)| Group { group, extent }).collect(),
            files: self.files.iter().map(FileMessage::of).collect(),
        };
        let rest = message.encode_to_vec();
        let numbers = [VERSION, rest.len() as u64, checksum::<Shipped>(&rest)];
        let mut bytes = MAGIC.to_vec();
        numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(rest);
        bytes
    }

    /// From bytes.
    ///
    /// # Errors
    /// If they are not all that [`encode`](Self::encode) gave.
    pub fn decode(bytes: &[u8]) -> Result<HandoverList, ListError> {
        if !bytes.starts_with(MAGIC) {
            let is_cut = MAGIC.starts_with(bytes);
            return Err(if is_cut { ListError::Damaged } else { ListError::NotAList });
        }
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or(ListError::Damaged)?;
        let numbers = &head[MAGIC.len()..];
        let number =
            |at: usize| u64::from_le_bytes(*numbers[at * 8..].first_chunk().expect("there are three"));
        if number(0) != VERSION {
            return Err(ListError::OtherVersion);
        }
        if number(1) != rest.len() as u64 || number(2) != checksum::<Shipped>(rest) {
            return Err(ListError::Damaged);
        }
        Message::decode(rest).ok().and_then(HandoverList::of).ok_or(ListError::Damaged)
    }

    fn of(message: Message) -> Option<HandoverList> {
        let mut leases = Kept::default();
        leases.apply(message.leases.into_iter().map(|LeaseRecord { key, value }| Change::Put { key, value }));
        let files = message.files.into_iter().map(FileMessage::handed).collect::<Option<_>>()?;
        let checkpoint = Checkpoint {
            position: message.checkpoint,
            timeline: message.timeline,
            time: message.checkpoint_time,
        };
        let (system, checksums) = (message.system, message.checksums);
        Some(HandoverList {
            server: ServerEnd { system, checkpoint, checksums },
            slots: message.slots,
            wanted_slots: message.wanted_slots,
            max_files: message.max_files,
            leases,
            groups: message.groups.iter().map(|group| (group.group, group.extent)).collect(),
            files,
        })
    }
}

impl FileMessage {
    fn of(file: &ListedFile) -> FileMessage {
        FileMessage {
            path: file.path.as_os_str().as_bytes().to_owned(),
            blocks: file.pages.iter().map(|page| page.block).collect(),
            slots: file.pages.iter().map(|page| page.slot).collect(),
            checksums: file.pages.iter().map(|page| page.checksum).collect(),
        }
    }

    /// `None`: the lists differ in length.
    fn handed(self) -> Option<ListedFile> {
        let is_whole = self.blocks.len() == self.slots.len() && self.slots.len() == self.checksums.len();
        let pages = self.blocks.into_iter().zip(self.slots).zip(self.checksums);
        let pages = pages.map(|((block, slot), checksum)| ListedPage { block, slot, checksum }).collect();
        is_whole.then(|| ListedFile { path: OsStr::from_bytes(&self.path).into(), pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> HandoverList {
        let mut leases = Kept::default();
        leases.apply([Change::Put { key: b"R1".into(), value: vec![7; 30] }]);
        let page = |block, slot, checksum| ListedPage { block, slot, checksum };
        let first = vec![page(0, 3, u64::MAX), page(u32::MAX, 4, 9)];
        let files = vec![
            ListedFile { path: "base/5/1".into(), pages: first },
            ListedFile { path: "base/5/2".into(), pages: vec![page(1, 5, 0)] },
        ];
        let checkpoint = Checkpoint { position: 1 << 40, timeline: 2, time: 3 };
        let server = ServerEnd { system: 5, checkpoint, checksums: 1 };
        let groups = vec![(0, 12), (2, 1 << 35)];
        HandoverList { server, slots: 4096, wanted_slots: 64, max_files: 16, leases, groups, files }
    }

    #[test]
    fn a_list_is_the_same_after_the_way_through_a_pipe() {
        assert_eq!(HandoverList::decode(&list().encode()), Ok(list()));
        assert_eq!(list().pages(), 3);
        let empty = HandoverList::default();
        assert_eq!(HandoverList::decode(&empty.encode()), Ok(empty));
    }

    #[test]
    fn a_list_that_was_cut_or_changed_or_is_of_another_version_is_refused() {
        let whole = list().encode();
        for length in 0..whole.len() {
            assert!(HandoverList::decode(&whole[..length]).is_err(), "{length} bytes");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(HandoverList::decode(&changed).is_err(), "byte {at}");
        }
        let mut other = whole.clone();
        other[MAGIC.len()] += 1;
        assert_eq!(HandoverList::decode(&other), Err(ListError::OtherVersion));
        assert_eq!(HandoverList::decode(b"usage: farpool"), Err(ListError::NotAList));
        let longer: Vec<u8> = whole.into_iter().chain([0]).collect();
        assert_eq!(HandoverList::decode(&longer), Err(ListError::Damaged));
    }

    #[test]
    fn the_format_is_the_one_of_version_1() {
        let mut leases = Kept::default();
        leases.apply([Change::Put { key: b"R1".into(), value: vec![7] }]);
        let pages = vec![ListedPage { block: 1, slot: 5, checksum: 9 }];
        let files = vec![ListedFile { path: "a".into(), pages }];
        let checkpoint = Checkpoint { position: 6, timeline: 2, time: 0 };
        let server = ServerEnd { system: 5, checkpoint, checksums: 0 };
        let list = HandoverList {
            server,
            slots: 4096,
            leases,
            groups: vec![(2, 3)],
            files,
            ..HandoverList::default()
        };
        let message =
            b"\x09\x05\0\0\0\0\0\0\0\x11\x06\0\0\0\0\0\0\0\x18\x02\x20\x80\x20\x4a\x07\x0a\x02R1\x12\x01\x07\
            \x52\x04\x08\x02\x10\x03\x5a\x13\x0a\x01a\x12\x01\x01\x1a\x01\x05\x22\x08\x09\0\0\0\0\0\0\0";
        let numbers = [1, 59, 0xeeed_3f00_8487_72a7_u64].map(u64::to_le_bytes).concat();
        assert_eq!(list.encode(), [&MAGIC[..], &numbers, message].concat());
    }

    #[test]
    fn lists_of_different_lengths_are_refused() {
        let file = FileMessage { blocks: vec![1, 2], slots: vec![1], ..FileMessage::default() };
        let file = FileMessage { checksums: vec![1, 2], ..file };
        assert_eq!(HandoverList::of(Message { files: vec![file], ..Message::default() }), None);
    }

    #[test]
    fn pages_keep_their_files_if_some_are_left_out_on_either_side() {
        let id = |inode| crate::FileId { device: 1, inode, generation: 0 };
        let page = |file, block| HandedPage { file, block, slot: block, checksum: 1 };
        let pages = vec![page(2, 20), page(0, 1), page(1, 10), page(2, 21)];
        let handed = HandedPages { files: vec![id(1), id(2), id(3)], pages };
        let mut list = HandoverList::default();
        list.set_pages(handed, |id| (id.inode != 2).then(|| format!("{}", id.inode).into()));
        assert_eq!(list.files.iter().map(|file| file.path.to_str().unwrap()).collect::<Vec<_>>(), ["1", "3"]);
        let found = list.pages_of(|at| (at == 1).then_some(0));
        assert_eq!(found, [page(0, 20), page(0, 21)]);
    }
}
