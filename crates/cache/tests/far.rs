//! Slots on real nodes, over shared memory and TCP: memory that is taken back or lost costs its slots only.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_cache::{
    Caller, Door, FarMemory, FarSlots, FarTable, Fetch, FileId, Index, Keeper, KnownFile, Layout, Outcome,
    PAGE_BYTES, SLOTS_PER_EXTENT, Shape, Shared, Shipped, Slots, at_once, collect_into,
};
use farpool_fabric::{Endpoint, EndpointConfig, MonotonicClock, Negotiated, SharedMemory, TransportChoice};
use farpool_pool::direct::{GuestRegion, GuestRegions};
use farpool_pool::{EXTENT_BYTES, NODE_DEADLINE, Pool, Stock};
use farpool_testpool::{REGION_BYTES, Rig, wait_until};

const EXTENTS_PER_REGION: u64 = REGION_BYTES / EXTENT_BYTES;
const GRACE: Duration = Duration::from_secs(60);
/// Room for a few pages.
const ARENA_BYTES: usize = 8 * PAGE_BYTES;

/// A cache's far memory, and the pool in which it lies.
struct Far {
    memory: FarMemory,
    table: FarTable,
    slot_count: u32,
    pool: Pool,
    rig: Rig,
}

impl Far {
    /// Slots that take all memory of a pool.
    fn all_of(rig: Rig, transport: TransportChoice) -> Far {
        let pool = rig.pool(transport);
        let slot_count = (pool.capacity().total_bytes / PAGE_BYTES as u64) as u32;
        let shared = SharedMemory::create("far-table", FarTable::bytes(slot_count)).unwrap();
        let table = FarTable::new(shared.mapping().clone(), slot_count).unwrap();
        let memory = FarMemory::new(pool.stock().clone(), table.clone());
        let far = Far { memory, table, slot_count, pool, rig };
        assert_eq!(far.grow().len() as u32 * SLOTS_PER_EXTENT, slot_count);
        assert!(far.memory.is_complete());
        far
    }

    /// Takes memory while there is some. Returns the slots that have got it.
    fn grow(&self) -> Vec<Range<u32>> {
        let Far { memory, rig, .. } = self;
        rig.runtime.block_on(async {
            let mut grown = Vec::new();
            while let Some(slots) = memory.grow().await {
                grown.push(slots);
            }
            grown
        })
    }

    /// The slots, as one more process of the database sees them.
    fn attach(&self) -> FarSlots {
        let stock: Arc<Stock> = self.pool.stock().clone();
        let ask = Box::new(move |number| GuestRegion::find(&stock.numbered_regions(), number));
        let clock = Arc::new(MonotonicClock);
        let regions: Arc<GuestRegions> = self.table.regions(EXTENTS_PER_REGION, clock, ask).unwrap();
        let transport = Rc::new(Negotiated::new(TransportChoice::Auto, NODE_DEADLINE));
        let endpoint = Endpoint::new(EndpointConfig::real(transport, ARENA_BYTES, NODE_DEADLINE));
        FarSlots::new(self.table.clone(), regions, Arc::default(), endpoint)
    }

    /// Waits until so many groups have lost their memory. Returns their slots, in order.
    fn await_loss(&self, groups: u64) -> Vec<Range<u32>> {
        let mut gone = Vec::new();
        wait_until(|| {
            gone.extend(self.memory.update());
            gone.len() as u64 == groups
        });
        gone.sort_by_key(|range| range.start);
        gone
    }
}

fn page_of(slot: u32) -> Vec<u8> {
    slot.to_le_bytes().repeat(PAGE_BYTES / 4)
}

fn has_page(slots: &FarSlots, slot: u32) -> bool {
    let mut page = Vec::new();
    slots.read(slot, &mut collect_into(&mut page)) && page == page_of(slot)
}

#[test]
fn pages_are_found_in_the_slots_in_which_they_were_written() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let far = Far::all_of(Rig::new(2, 2), transport);
        let slots = far.attach();
        assert!((0..far.slot_count).all(|slot| slots.write(slot, &page_of(slot))));
        let others = far.attach();
        assert!((0..far.slot_count).all(|slot| has_page(&others, slot)));
        assert!(!slots.write(far.slot_count, &page_of(0)) && !slots.read(u32::MAX, &mut |_, _| ()));
        assert!(!slots.write(0, &[1]), "whole pages only");
        assert!(has_page(&slots, 0));
        assert_eq!(far.memory.update(), []);
    }
}

#[test]
fn memory_that_is_taken_back_is_given_back_at_once_and_taken_again_when_there_is_room() {
    let far = Far::all_of(Rig::new(2, 2), TransportChoice::Shm);
    let slots = far.attach();
    assert!((0..far.slot_count).all(|slot| slots.write(slot, &page_of(slot))));
    let taken_back = far.rig.take_back_from(far.pool.owner(), 2, GRACE);
    assert_eq!(taken_back, 2);
    let gone = far.await_loss(u64::from(taken_back) * EXTENTS_PER_REGION);
    let is_gone = |slot: u32| gone.iter().any(|range| range.contains(&slot));
    assert!((0..far.slot_count).all(|slot| has_page(&slots, slot) != is_gone(slot)));
    assert!(!slots.write(gone[0].start, &page_of(0)));
    // Long before the grace has ended.
    let owner = far.pool.stock().clone();
    wait_until(|| owner.regions().iter().all(|region| !region.is_leaving()));
    let mut again = Vec::new();
    wait_until(|| {
        again.extend(far.grow());
        far.memory.is_complete()
    });
    again.sort_by_key(|range| range.start);
    assert_eq!(again, gone);
    assert!((0..far.slot_count).all(|slot| slots.write(slot, &page_of(slot)) && has_page(&slots, slot)));
}

#[test]
fn a_lost_node_costs_its_slots_only_and_they_get_other_memory() {
    let mut far = Far::all_of(Rig::new(2, 2), TransportChoice::Tcp);
    let slots = far.attach();
    assert!((0..far.slot_count).all(|slot| slots.write(slot, &page_of(slot))));
    far.rig.kill_node(0);
    let gone = far.await_loss(2 * EXTENTS_PER_REGION);
    let is_gone = |slot: u32| gone.iter().any(|range| range.contains(&slot));
    assert!((0..far.slot_count).all(|slot| has_page(&slots, slot) != is_gone(slot)));
    far.rig.start_node(2);
    wait_until(|| {
        far.grow();
        far.memory.is_complete()
    });
    let others = far.attach();
    assert!((0..far.slot_count).all(|slot| others.write(slot, &page_of(slot)) && has_page(&slots, slot)));
}

#[test]
fn a_cache_that_is_to_be_smaller_drops_slots_and_takes_them_again() {
    let far = Far::all_of(Rig::new(2, 2), TransportChoice::Shm);
    let (slots, all) = (far.attach(), far.slot_count);
    assert!((0..all).all(|slot| slots.write(slot, &page_of(slot))));
    far.memory.want(all / 2);
    let gone = far.memory.update();
    assert_eq!(gone.len() as u32 * SLOTS_PER_EXTENT, all / 2);
    let is_gone = |slot: u32| gone.iter().any(|range| range.contains(&slot));
    assert!((0..all).all(|slot| has_page(&slots, slot) != is_gone(slot)));
    assert!(far.memory.is_complete() && far.grow().is_empty() && far.memory.update().is_empty());
    far.memory.want(all);
    let mut again = Vec::new();
    wait_until(|| {
        again.extend(far.grow());
        far.memory.is_complete()
    });
    assert_eq!(again.len(), gone.len());
    assert!((0..all).all(|slot| slots.write(slot, &page_of(slot)) && has_page(&slots, slot)));
}

/// A cache with one file, in which each block holds its number.
struct Cache {
    keeper: Keeper<Shared<FarSlots>>,
    caller: Caller<Shared<FarSlots>>,
    file: KnownFile,
}

impl Cache {
    fn over(far: &Far) -> Cache {
        let shape = Shape { places: 2, files: 1, slots: far.slot_count };
        let layout = Layout::new(shape);
        let door = SharedMemory::create("far-door", Layout::door_bytes(2)).unwrap();
        let words = SharedMemory::create("far-index", layout.index_bytes()).unwrap();
        let index = || Index::new(words.mapping().clone(), shape, far.attach()).unwrap();
        let ground = || {
            let none = Box::new(|_, _| None);
            Shared::new(door.mapping().clone(), 2, none).unwrap().with_index(0, index())
        };
        let mut keeper = at_once(Keeper::<_, Shipped>::start(ground(), layout, |_| true));
        assert!((0..2).any(|_| at_once(keeper.turn_door(Door::Open))), "two turns open the door");
        at_once(keeper.sweep());
        let caller = at_once(Caller::join(ground(), 2, 1)).unwrap();
        let file = KnownFile::new(FileId { device: 1, inode: 2, generation: 3 });
        let mut cache = Cache { keeper, caller, file };
        cache.read(0); // asks for the file
        (0..2).for_each(|_| at_once(cache.keeper.maintain_files()));
        cache
    }

    /// Reads a block. Returns whether it was a hit.
    fn read(&mut self, block: u32) -> bool {
        let mut page = vec![0; PAGE_BYTES];
        let pread = async |to: &mut [u8]| {
            to.copy_from_slice(&page_of(block));
            Ok(PAGE_BYTES)
        };
        let outcome =
            at_once(self.caller.read(&mut self.file, block, &mut page, async || true, pread)).unwrap();
        assert!(outcome.page_or(&page) == page_of(block), "block {block}");
        matches!(outcome, Outcome::Hit(_))
    }

    /// Reads blocks, and does what the owner of the cache does, until all blocks are found and `slots` of the
    /// slots have memory.
    fn warm(&mut self, far: &Far, blocks: u32, slots: u32) {
        wait_until(|| {
            far.memory.update().into_iter().for_each(|gone| self.keeper.withdraw_slots(gone));
            if slots == far.slot_count {
                far.grow().into_iter().for_each(|grown| self.keeper.restore_slots(grown));
            }
            let absent = at_once(self.keeper.sweep()).absent;
            let found = (0..blocks).filter(|block| self.read(*block)).count() as u32;
            found == blocks && absent == far.slot_count - slots
        });
    }
}

#[test]
fn pages_whose_memory_was_taken_back_are_read_from_the_disk_and_cached_again() {
    let far = Far::all_of(Rig::new(2, 2), TransportChoice::Shm);
    let mut cache = Cache::over(&far);
    let (all, blocks) = (far.slot_count, far.slot_count / 4 * 3);
    assert!(!cache.read(0));
    cache.warm(&far, blocks, all);
    assert_eq!(far.rig.take_back_from(far.pool.owner(), 2, GRACE), 2);
    cache.warm(&far, blocks / 4, all / 2);
    assert!(!(0..blocks).all(|block| cache.read(block)), "half of the memory is too little");
    cache.warm(&far, blocks, all);
}

#[test]
fn a_fetched_page_is_passed_on_once_and_only_for_its_entry() {
    let far = Far::all_of(Rig::new(2, 2), TransportChoice::Tcp);
    let slots = far.attach();
    assert!((0..3).all(|slot| slots.write(slot, &page_of(slot))));
    slots.fetch(&[0, 1, 2, far.slot_count].map(|slot| Fetch { slot, entry: 7 }));
    let is_fetched = |slot, entry| {
        let mut page = Vec::new();
        let found = slots.read_fetched(Fetch { slot, entry }, &mut collect_into(&mut page));
        assert!(!found || page == page_of(slot));
        found
    };
    assert!(!is_fetched(1, 8), "the entry has another page");
    assert!(is_fetched(1, 7) && !is_fetched(1, 7), "once");
    assert!(is_fetched(0, 7) && is_fetched(2, 7) && !is_fetched(far.slot_count, 7));
}
