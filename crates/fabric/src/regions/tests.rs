//! Regions alone, without a transport.

use std::os::fd::AsFd;

use super::*;

const KEY: AccessKey = AccessKey::from_bytes([7; 16]);
const REGION_BYTES: u64 = 64 << 10;

fn set() -> RegionSet {
    RegionSet::create(2, REGION_BYTES, Locking::None, |_| {}).unwrap()
}

fn first_byte(set: &RegionSet, epoch: Epoch) -> u8 {
    let mut byte = [0];
    set.with_region(0, epoch, AccessKind::Read, &mut |memory| memory.read(0, &mut byte)).unwrap();
    byte[0]
}

#[test]
fn a_region_lent_again_shows_nothing_of_its_last_holder() {
    let set = set();
    set.open(0, Epoch(1), KEY);
    set.with_region(0, Epoch(1), AccessKind::Write, &mut |memory| memory.write(0, &[1; 100])).unwrap();
    set.fence(0);
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
    set.open(0, Epoch(2), KEY);
    assert_eq!(first_byte(&set, Epoch(2)), 0);
}

#[test]
fn a_fenced_epoch_is_refused() {
    let set = set();
    set.open(0, Epoch(1), KEY);
    set.fence(0);
    let access = set.with_region(0, Epoch(1), AccessKind::Write, &mut |memory| memory.write(0, &[1]));
    assert_eq!(access, Err(Refusal::StaleEpoch));
    assert_eq!(set.check(0, Epoch(1), &KEY), Err(Refusal::StaleEpoch));
}

/// Opens the first region. Returns its memory as a process gets it, and that process's mapping, to which it
/// has written.
fn open_and_map(set: &RegionSet) -> (SharedRegion, Mapping) {
    set.open(0, Epoch(1), KEY);
    let shared = set.share(0, Epoch(1), &KEY).unwrap();
    let view = Mapping::new(shared.memory.as_fd(), REGION_BYTES, crate::Protection::ReadWrite).unwrap();
    view.write(0, &[9; 8192]).unwrap();
    (shared, view)
}

#[test]
fn memory_handed_out_is_given_back_and_replaced_even_if_a_process_maps_it() {
    let set = set();
    let (shared, view) = open_and_map(&set);
    let occupied = || rustix::fs::fstat(&shared.memory).unwrap().st_blocks;
    assert!(occupied() > 0);
    set.fence(0);
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
    assert_eq!(occupied(), 0, "a stopped process must not keep a node's memory");
    set.open(0, Epoch(2), KEY);
    view.write(0, &[9]).unwrap(); // a process that kept its mapping
    assert_eq!(first_byte(&set, Epoch(2)), 0);
}

#[test]
fn a_withdrawn_region_takes_no_memory_and_has_none_of_its_bytes_when_it_is_restored() {
    let set = set();
    let (shared, view) = open_and_map(&set);
    let occupied = || rustix::fs::fstat(&shared.memory).unwrap().st_blocks;
    set.fence(0);
    assert!(occupied() > 0);
    assert_eq!(set.withdraw(0), Scrubbed::Clean);
    assert_eq!(occupied(), 0);
    assert_eq!(set.withdraw(0), Scrubbed::Clean, "nothing is left to give back");
    set.restore(0).unwrap();
    set.open(0, Epoch(2), KEY);
    view.write(0, &[9]).unwrap(); // a process that kept its mapping
    assert_eq!(first_byte(&set, Epoch(2)), 0);
}

/// A card that is cut off at once.
struct Quiet;

impl CutOff for Quiet {
    fn cut(&self) {}
}

#[test]
fn memory_that_a_card_still_has_is_not_withdrawn() {
    let set = set();
    set.open(0, Epoch(1), KEY);
    let lent = set.lend(0, Epoch(1), &KEY, Arc::new(Quiet)).unwrap();
    set.fence(0);
    assert_eq!(set.withdraw(0), Scrubbed::StillHeld);
    drop(lent);
    assert_eq!(set.withdraw(0), Scrubbed::Clean);
}

#[test]
fn a_wrong_key_opens_nothing() {
    let set = set();
    set.open(0, Epoch(1), KEY);
    let wrong = AccessKey::from_bytes([8; 16]);
    assert_eq!(set.check(0, Epoch(1), &wrong), Err(Refusal::WrongKey));
    assert!(matches!(set.share(0, Epoch(1), &wrong), Err(Refusal::WrongKey)));
    assert_eq!(set.check(5, Epoch(1), &KEY), Err(Refusal::NotAttached));
}

const OTHER: Epoch = Epoch(2);
const OTHER_KEY: AccessKey = AccessKey::from_bytes([9; 16]);

/// Two grants on region 0: the owner's under epoch 1, and another.
fn shared_set(mode: GrantMode) -> RegionSet {
    let set = set();
    set.open(0, Epoch(1), KEY);
    set.open_grant(0, OTHER, OTHER_KEY, mode);
    set
}

/// The view of a process to which a region was handed.
struct View {
    memory: Mapping,
    words: Mapping,
    shared: SharedRegion,
}

impl View {
    fn of(set: &RegionSet, epoch: Epoch, key: &AccessKey) -> View {
        let shared = set.share(0, epoch, key).unwrap();
        let protection = match shared.attached.mode {
            GrantMode::ReadOnly => crate::Protection::ReadOnly,
            GrantMode::ReadWrite => crate::Protection::ReadWrite,
        };
        let memory = Mapping::new(shared.memory.as_fd(), REGION_BYTES, protection).unwrap();
        let words_bytes = shared.attached.word_offset + 8;
        let words = Mapping::new(shared.words.as_fd(), words_bytes, crate::Protection::ReadOnly).unwrap();
        View { memory, words, shared }
    }

    fn is_valid(&self) -> bool {
        self.words.load(self.shared.attached.word_offset) == Ok(self.shared.attached.stamp)
    }
}

#[test]
fn a_read_only_grant_reads_and_changes_nothing() {
    let set = shared_set(GrantMode::ReadOnly);
    assert_eq!(first_byte(&set, OTHER), 0);
    let access = set.with_region(0, OTHER, AccessKind::Write, &mut |memory| memory.write(0, &[1]));
    assert_eq!(access, Err(Refusal::ReadOnly));
    let shared = set.share(0, OTHER, &OTHER_KEY).unwrap();
    assert!(Mapping::new(shared.memory.as_fd(), REGION_BYTES, crate::Protection::ReadWrite).is_err());
    assert_eq!(first_byte(&set, Epoch(1)), 0);
}

#[test]
fn each_grant_has_its_own_key_and_end() {
    let set = shared_set(GrantMode::ReadWrite);
    assert_eq!(set.check(0, OTHER, &KEY), Err(Refusal::WrongKey));
    assert_eq!(set.check(0, OTHER, &OTHER_KEY), Ok(()));
    set.fence_grant(0, OTHER).unwrap();
    assert_eq!(set.check(0, OTHER, &OTHER_KEY), Err(Refusal::StaleEpoch));
    assert_eq!(set.check(0, Epoch(1), &KEY), Ok(()));
    set.open_grant(0, Epoch(3), OTHER_KEY, GrantMode::ReadWrite);
    set.fence(0);
    assert_eq!(set.check(0, Epoch(1), &KEY), Err(Refusal::StaleEpoch));
    assert_eq!(set.check(0, Epoch(3), &OTHER_KEY), Err(Refusal::StaleEpoch));
}

#[test]
fn a_fenced_sharer_stores_where_nothing_reads_and_what_was_stored_before_stays() {
    let set = shared_set(GrantMode::ReadWrite);
    let owner = View::of(&set, Epoch(1), &KEY);
    let fenced = View::of(&set, OTHER, &OTHER_KEY);
    fenced.memory.write(0, &[3]).unwrap();
    owner.memory.write(REGION_BYTES - 1, &[4]).unwrap();
    set.fence_grant(0, OTHER).unwrap();
    assert!(!fenced.is_valid());
    assert!(!owner.is_valid(), "it has to attach again");
    fenced.memory.write(0, &[9; 8]).unwrap();
    assert_eq!(first_byte(&set, Epoch(1)), 3);
    let again = View::of(&set, Epoch(1), &KEY);
    assert!(again.is_valid());
    let mut last = [0];
    again.memory.read(REGION_BYTES - 1, &mut last).unwrap();
    assert_eq!(last, [4]);
    assert!(matches!(set.share(0, OTHER, &OTHER_KEY), Err(Refusal::StaleEpoch)));
}

#[test]
fn a_fence_with_a_spare_at_hand_allocates_nothing() {
    let mut set = shared_set(GrantMode::ReadWrite);
    set.keep_spare().unwrap();
    let spare = |set: &RegionSet| set.spare.lock().as_ref().map(|memory| Arc::as_ptr(memory.mapping()));
    let kept = spare(&set);
    assert!(kept.is_some());
    let _fenced = View::of(&set, OTHER, &OTHER_KEY);
    set.fence_grant(0, OTHER).unwrap();
    let place = set.slots[0].read().memory.as_ref().map(|memory| Arc::as_ptr(memory.mapping()));
    assert_eq!((place, spare(&set)), (kept, None));
    set.restore_spare().unwrap();
    assert!(spare(&set).is_some_and(|again| Some(again) != kept));
    assert_eq!(set.spare.lock().as_ref().unwrap().mapping().load(0), Ok(0));
}

#[test]
fn a_fence_that_moves_nothing_waits_for_no_move_of_another() {
    let set = shared_set(GrantMode::ReadWrite);
    let _another_moves = set.spare.lock();
    set.fence_grant(0, OTHER).unwrap();
    assert_eq!(set.check(0, OTHER, &OTHER_KEY), Err(Refusal::StaleEpoch));
    set.restore_spare().unwrap(); // does not wait either
}

#[test]
fn while_a_region_is_copied_its_accesses_are_busy_and_others_go_on() {
    let set = shared_set(GrantMode::ReadWrite);
    set.open(1, Epoch(5), KEY);
    let owner = View::of(&set, Epoch(1), &KEY);
    owner.memory.write(0, &[6]).unwrap();
    let from = set.slots[0].write().begin_copy(0, &set.words).unwrap();
    assert!(!owner.is_valid(), "what is stored from now on may be missing in the copy");
    let access = set.with_region(0, Epoch(1), AccessKind::Read, &mut |_| unreachable!("it is being copied"));
    assert_eq!(access, Err(Refusal::Busy));
    assert_eq!(set.check(0, Epoch(1), &KEY), Err(Refusal::Busy));
    assert!(matches!(set.share(0, Epoch(1), &KEY), Err(Refusal::Busy)));
    assert_eq!(set.with_region(1, Epoch(5), AccessKind::Write, &mut |memory| memory.write(0, &[1])), Ok(()));
    let fresh = set.new_memory().unwrap();
    fresh.mapping().copy_all(&from).unwrap();
    assert!(set.slots[0].write().end_copy(fresh).is_some());
    assert_eq!(first_byte(&set, Epoch(1)), 6);
}

#[test]
fn nothing_moves_for_a_grant_whose_process_never_had_the_memory() {
    let set = shared_set(GrantMode::ReadWrite);
    let owner = View::of(&set, Epoch(1), &KEY);
    set.fence_grant(0, OTHER).unwrap();
    assert!(owner.is_valid());
    owner.memory.write(0, &[5]).unwrap();
    assert_eq!(first_byte(&set, Epoch(1)), 5);
}

#[test]
fn a_place_that_is_used_again_shows_another_stamp() {
    let set = shared_set(GrantMode::ReadWrite);
    let slept_through = View::of(&set, OTHER, &OTHER_KEY);
    for epoch in 3..100 {
        set.fence_grant(0, Epoch(epoch - 1)).unwrap();
        set.open_grant(0, Epoch(epoch), KEY, GrantMode::ReadWrite);
        let next = set.share(0, Epoch(epoch), &KEY).unwrap();
        assert_eq!(next.attached.word_offset, slept_through.shared.attached.word_offset);
        assert!(!slept_through.is_valid(), "epoch {epoch}");
    }
}

/// Counts how often it was cut, and accesses the regions meanwhile, as a thread that the cut waits for might.
struct Counted {
    set: std::sync::Weak<RegionSet>,
    cuts: std::sync::atomic::AtomicU32,
    shares_meanwhile: Mutex<Vec<Option<Refusal>>>,
}

impl Counted {
    fn new(set: &Arc<RegionSet>) -> Arc<Self> {
        Arc::new(Counted {
            set: Arc::downgrade(set),
            cuts: 0.into(),
            shares_meanwhile: Mutex::new(Vec::new()),
        })
    }

    fn cuts(&self) -> u32 {
        self.cuts.load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl CutOff for Counted {
    fn cut(&self) {
        self.cuts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let set = self.set.upgrade().unwrap();
        self.shares_meanwhile.lock().push(set.share(0, Epoch(1), &KEY).err());
    }
}

#[test]
fn lent_access_is_cut_with_its_own_grant_only_and_the_memory_scrubbed_when_it_has_ended() {
    let set = Arc::new(shared_set(GrantMode::ReadOnly));
    let (owner, other) = (Counted::new(&set), Counted::new(&set));
    let lent = set.lend(0, Epoch(1), &KEY, owner.clone()).unwrap();
    let read_only = set.lend(0, OTHER, &OTHER_KEY, other.clone()).unwrap();
    assert!(lent.writable && !read_only.writable);
    assert!(matches!(set.lend(0, OTHER, &KEY, other.clone()), Err(Refusal::WrongKey)));
    lent.mapping.write(0, &[1]).unwrap();
    set.fence_grant(0, OTHER).unwrap();
    assert_eq!((owner.cuts(), other.cuts()), (0, 1));
    set.fence(0);
    assert_eq!(owner.cuts(), 1);
    drop(read_only);
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::StillHeld);
    drop(lent);
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
}

#[test]
fn memory_lent_to_cards_only_is_scrubbed_in_place() {
    let set = set();
    set.open(0, Epoch(1), KEY);
    let lent = set.lend(0, Epoch(1), &KEY, Arc::new(Quiet)).unwrap();
    let mapping = lent.mapping.clone();
    mapping.write(0, &[1]).unwrap();
    drop(lent);
    let place =
        |set: &RegionSet| set.slots[0].read().memory.as_ref().map(|memory| Arc::as_ptr(memory.mapping()));
    assert_eq!(place(&set), Some(Arc::as_ptr(&mapping)));
    set.fence(0);
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
    assert_eq!(place(&set), Some(Arc::as_ptr(&mapping)));
    set.open(0, Epoch(2), KEY);
    assert_eq!(first_byte(&set, Epoch(2)), 0);
}

#[test]
fn a_move_cuts_all_lent_access_and_does_not_lend_the_memory_meanwhile() {
    let set = Arc::new(shared_set(GrantMode::ReadWrite));
    let owner = Counted::new(&set);
    let lent = set.lend(0, Epoch(1), &KEY, owner.clone()).unwrap();
    lent.mapping.write(0, &[7]).unwrap();
    let _fenced = View::of(&set, OTHER, &OTHER_KEY);
    set.fence_grant(0, OTHER).unwrap();
    assert_eq!(owner.cuts(), 1);
    assert_eq!(*owner.shares_meanwhile.lock(), [Some(Refusal::Busy)]);
    assert_eq!(first_byte(&set, Epoch(1)), 7);
    lent.mapping.write(0, &[8]).unwrap(); // a card that goes on all the same
    assert_eq!(first_byte(&set, Epoch(1)), 7);
    assert!(set.lend(0, Epoch(1), &KEY, owner).is_ok());
}

#[test]
fn a_lease_that_ends_while_its_region_moves_stays_ended() {
    /// Ends the lease when it is cut.
    struct Ends(std::sync::Weak<RegionSet>);
    impl CutOff for Ends {
        fn cut(&self) {
            let set = self.0.upgrade().unwrap();
            if !set.slots[0].read().grants.is_empty() {
                set.fence(0);
            }
            assert_eq!(set.scrub(0).unwrap(), Scrubbed::StillHeld);
        }
    }
    let set = Arc::new(shared_set(GrantMode::ReadWrite));
    let lent = set.lend(0, Epoch(1), &KEY, Arc::new(Ends(Arc::downgrade(&set)))).unwrap();
    let fenced = View::of(&set, OTHER, &OTHER_KEY);
    set.fence_grant(0, OTHER).unwrap();
    assert_eq!(set.check(0, Epoch(1), &KEY), Err(Refusal::StaleEpoch));
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::StillHeld);
    drop((lent, fenced));
    assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
}
