//! Memory that no table needs any more: dropped tables are cleared, and regions without tables go back to the
//! pool (`docs/src/namdb.md`, *memory that is leased later*).

use farpool_fabric::Endpoint;
use farpool_txn::horizon::horizon;
use farpool_txn::later::Stage;
use farpool_txn::membership::listed_later_grants;
use farpool_txn::{Memory, Transaction};
use farpool_wire::{RecordHeader, Version};

use super::Catalog;
use super::changing::{Change, Turn, change};
use super::making::read_maps;
use super::tombstones::clear_tombstones;
use crate::environment::Environment;
use crate::error::{DatabaseError, TxError};
use crate::member::MemberCore;
use crate::regions::LaterRegion;
use crate::rules::MemberRules;

/// What [`tidy`] would find to do, as far as can be seen without a snapshot.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Waste {
    /// Dropped tables can be cleared, or regions can be given back.
    pub(crate) can_be_freed: bool,
    /// No table has anything in a region that the database got later.
    pub(crate) has_empty_region: bool,
}

/// Looks for memory that no table needs.
pub(crate) async fn look_for_waste<E: Environment>(
    member: &MemberCore<E>,
    memory: &Memory,
) -> Result<Waste, DatabaseError> {
    let can_be_freed =
        has_ripe_tombstone(member, memory).await? || !left_by_all::<E>(member, memory).await?.is_empty();
    Ok(Waste { can_be_freed, has_empty_region: has_empty_region(member, memory).await? })
}

/// Whether a table was dropped that no snapshot has any more.
async fn has_ripe_tombstone<E: Environment>(
    member: &MemberCore<E>,
    memory: &Memory,
) -> Result<bool, DatabaseError> {
    let at = member.at();
    let Some(horizon) = horizon(memory, &at.horizon()).await? else { return Ok(false) };
    let headers = at.tombstones().read_headers(memory).await?;
    let is_ripe = |header: &RecordHeader| {
        let is_tombstone = !header.is_deleted() && header.version() != Version::INITIAL;
        is_tombstone && !header.is_locked() && horizon.sees(header.version())
    };
    Ok(headers.iter().any(is_ripe))
}

/// Whether no table has anything in a region that the database got later.
async fn has_empty_region<E: Environment>(
    member: &MemberCore<E>,
    memory: &Memory,
) -> Result<bool, DatabaseError> {
    let (at, first) = (member.at(), member.layout().regions.len() as u64);
    let places = at.later_regions().places(memory).await?;
    for (number, _) in (first..).zip(places).filter(|(_, place)| place.stage == Stage::Used) {
        let map = at.maps().look_at(memory, number).await?;
        if map.is_some_and(|map| map.iter().all(|&byte| byte == 0)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Frees the memory of dropped tables that no snapshot has any more, and gives back regions that all members
/// have left. `leaves_empty`: all members are to leave regions without tables, also if no memory is freed
/// now.
pub(crate) async fn tidy<E: Environment>(
    turn: Turn<'_>,
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    leaves_empty: bool,
) -> Result<(), TxError> {
    change(turn, member, endpoint, async |change| {
        if leaves_empty {
            change.note_freed();
        }
        clear_tombstones(change).await?;
        give_back_regions(change).await
    })
    .await
}

/// The places in the list whose regions no member uses any more, and which are not free yet.
async fn left_by_all<E: Environment>(
    member: &MemberCore<E>,
    memory: &Memory,
) -> Result<Vec<u16>, DatabaseError> {
    let places = member.at().later_regions().places(memory).await?;
    let leaving = (0..).zip(places).filter(|(_, place)| place.stage == Stage::Leaving);
    let leaving: Vec<u16> = leaving.map(|(number, _)| number).collect();
    if leaving.is_empty() || !E::Rules::waits_for_leaving_members() {
        return Ok(leaving);
    }
    // Behind the look at the list: a member that lists a grant from now on finds that the region is leaving.
    let listed = listed_later_grants(memory, &member.at().members()).await?;
    Ok(leaving.into_iter().filter(|number| listed.get(usize::from(*number)) == Some(&false)).collect())
}

/// Gives regions back that no member uses any more.
async fn give_back_regions<E: Environment>(change: &Change<'_, E>) -> Result<(), TxError> {
    let (member, memory) = (change.member, change.memory());
    let list = member.at().later_regions();
    for number in left_by_all(member, memory).await? {
        let entry = list.entry(memory, number).await.map_err(TxError::Memory)?;
        let lease = entry.and_then(|entry| LaterRegion::decode_lease(&entry));
        let lease = lease.ok_or_else(|| TxError::Damaged("the lease of a region is damaged".to_owned()))?;
        // If its node does not answer, the lease ends by itself: nobody renews it.
        member.environment().give_back_regions(vec![lease]).await;
        list.advance(memory, number, Stage::Leaving).await.map_err(TxError::Memory)?;
    }
    Ok(())
}

/// Marks the regions in which no table has memory as leaving. Members then give up their leases. Called at
/// the end of each change that has freed memory.
pub(super) async fn leave_empty_regions<E: Environment>(change: &Change<'_, E>) -> Result<(), TxError> {
    let (member, memory) = (change.member, change.memory());
    let (regions, list) = (member.regions(), member.at().later_regions());
    let first = regions.layout().regions.len();
    if regions.count() == first {
        return Ok(());
    }
    let read = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        read_maps(&regions, transaction, catalog).await
    };
    let maps = change.transact(read).await?;
    for (number, map) in (0..).zip(&maps[first..]) {
        let is_known = regions.grant(first + usize::from(number)).is_some();
        if is_known && (map.is_empty() || !E::Rules::keeps_regions_in_use()) {
            list.advance(memory, number, Stage::Used).await.map_err(TxError::Memory)?;
        }
    }
    Ok(())
}
