//! How a file survives the loss of a node, and where the members of its rows belong. Pure.
//!
//! A row is `data` consecutive extents of a file and one parity extent, all on nodes of their own. The
//! parity's position among them rotates from row to row, so that no node has all of it. A mirror is a row
//! with one data extent: the parity of one extent is its copy.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use farpool_pool::EXTENT_BYTES;

use crate::file_core::MAX_FILE_BYTES;

/// Data extents of a row by default: five nodes, and a fifth of the memory for the parity.
pub const DEFAULT_PARITY_DATA: u8 = 4;
/// Most data extents of a row: a row survives the loss of only one of its nodes at a time, and reconstruction
/// reads all other members.
pub const MAX_PARITY_DATA: u8 = 16;
/// Parity extents come after all extents with data in a file's list, by the number of their row.
const FIRST_PARITY: u64 = 1 << 40;

/// How a file survives the loss of a node.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Redundancy {
    /// It does not survive the loss. But the whole file lies on one node as long as that node has room, so
    /// the loss of other nodes does not affect it.
    None,
    /// It does not survive the loss: its extents lie on one node after the other.
    #[default]
    Stripe,
    /// It survives the loss of one node of a row: `data` extents and their parity, each on a node of its own.
    Parity {
        /// Extents with data, at least two.
        data: u8,
    },
    /// It survives the loss of one of the two nodes on which each extent lies.
    Mirror,
}

impl Redundancy {
    /// How the file's rows are formed, if it has any.
    pub(crate) fn rows(self) -> Option<Rows> {
        match self {
            Redundancy::None | Redundancy::Stripe => None,
            Redundancy::Parity { data } => Some(Rows { data: u64::from(data) }),
            Redundancy::Mirror => Some(Rows { data: 1 }),
        }
    }

    /// Nodes that a file with this redundancy needs at least.
    pub fn nodes(self) -> u64 {
        self.rows().map_or(1, |rows| rows.data + 1)
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Redundancy::None => out.write_str("none"),
            Redundancy::Stripe => out.write_str("stripe"),
            Redundancy::Parity { data } => write!(out, "parity:{data}"),
            Redundancy::Mirror => out.write_str("mirror"),
        }
    }
}

/// The text is not the name of a redundancy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "not a redundancy: use none, stripe, mirror, parity, or parity:K with K from 2 to {MAX_PARITY_DATA} extents of data in a row"
)]
pub struct NotARedundancy;

impl FromStr for Redundancy {
    type Err = NotARedundancy;

    fn from_str(text: &str) -> Result<Self, NotARedundancy> {
        match text {
            "none" => Ok(Redundancy::None),
            "stripe" => Ok(Redundancy::Stripe),
            "mirror" => Ok(Redundancy::Mirror),
            "parity" => Ok(Redundancy::Parity { data: DEFAULT_PARITY_DATA }),
            other => {
                let data = other.strip_prefix("parity:").and_then(|count| count.parse().ok());
                let data = data.filter(|data| (2..=MAX_PARITY_DATA).contains(data));
                data.map(|data| Redundancy::Parity { data }).ok_or(NotARedundancy)
            }
        }
    }
}

/// How a file's extents form rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rows {
    /// Extents with data in a row.
    pub(crate) data: u64,
}

impl Rows {
    /// The row of a member, with data or parity.
    pub(crate) fn row_of(self, stripe: u64) -> u64 {
        if is_parity(stripe) { stripe - FIRST_PARITY } else { stripe / self.data }
    }

    /// The members of a row that hold data.
    pub(crate) fn data_of(self, row: u64) -> std::ops::Range<u64> {
        row * self.data..(row + 1) * self.data
    }

    /// The member of a row that holds the parity.
    pub(crate) fn parity_of(self, row: u64) -> u64 {
        FIRST_PARITY + row
    }

    /// Of members that may soon be lost, those that must move first: all but the last one of each row, or all
    /// if the row has already lost a member.
    pub(crate) fn members_to_save_first(self, members: &[u64], is_lost: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut by_row = BTreeMap::<u64, Vec<u64>>::new();
        for &member in members {
            by_row.entry(self.row_of(member)).or_default().push(member);
        }
        let first = by_row.into_iter().flat_map(|(row, mut members)| {
            let has_lost_one = self.data_of(row).chain([self.parity_of(row)]).any(&is_lost);
            members.truncate(members.len() - usize::from(!has_lost_one));
            members
        });
        first.collect()
    }

    /// The place of the pool where a member belongs: consecutive places are on consecutive nodes.
    pub(crate) fn place(self, stripe: u64) -> u64 {
        let row = self.row_of(stripe);
        let parity_at = self.data - row % (self.data + 1);
        let at = if is_parity(stripe) {
            parity_at
        } else {
            let index = stripe % self.data;
            index + u64::from(index >= parity_at)
        };
        row * (self.data + 1) + at
    }
}

/// Whether a member of a file's list holds parity.
pub(crate) fn is_parity(stripe: u64) -> bool {
    stripe >= FIRST_PARITY
}

/// Comes after all members with data.
pub(crate) const END_OF_DATA: u64 = FIRST_PARITY;

const _: () = assert!(MAX_FILE_BYTES / EXTENT_BYTES <= FIRST_PARITY);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn members_of_a_row_have_places_of_their_own_and_the_parity_rotates() {
        for data in [1, 2, 4, 16] {
            let rows = Rows { data };
            let mut parities = BTreeSet::new();
            for row in 0..3 * (data + 1) {
                let parity = rows.parity_of(row);
                assert!(is_parity(parity) && rows.row_of(parity) == row);
                let members = rows.data_of(row).chain([parity]);
                let places: BTreeSet<u64> = members.map(|stripe| rows.place(stripe)).collect();
                assert!(places.into_iter().eq(row * (data + 1)..(row + 1) * (data + 1)));
                assert!(rows.data_of(row).all(|stripe| rows.row_of(stripe) == row && !is_parity(stripe)));
                parities.insert(rows.place(parity) % (data + 1));
            }
            assert_eq!(parities.len() as u64, data + 1, "every node has some of the parity");
        }
    }

    #[test]
    fn one_member_of_a_whole_row_may_be_lost_and_none_of_a_degraded_one() {
        let rows = Rows { data: 2 };
        let [first, second] = [rows.parity_of(0), rows.parity_of(1)];
        let soon = [0, 1, 2, 7, first, second];
        assert_eq!(rows.members_to_save_first(&soon, |_| false), [0, 1, 2]);
        assert_eq!(rows.members_to_save_first(&soon, |member| member == 6), [0, 1, 2, 7]);
        assert_eq!(rows.members_to_save_first(&soon, |member| member == 3), [0, 1, 2, second]);
        assert_eq!(rows.members_to_save_first(&[5, first], |_| false), []);
    }

    #[test]
    fn a_redundancy_is_displayed_as_it_is_parsed() {
        for text in ["none", "stripe", "mirror", "parity:2", "parity:16"] {
            assert_eq!(text.parse::<Redundancy>().unwrap().to_string(), text);
        }
        assert_eq!("parity".parse(), Ok(Redundancy::Parity { data: DEFAULT_PARITY_DATA }));
        for text in ["", "raid5", "parity:", "parity:1", "parity:17", "parity:x", "Mirror"] {
            assert!(text.parse::<Redundancy>().is_err(), "{text}");
        }
    }
}
