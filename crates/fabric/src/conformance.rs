//! The contract, as tests that every transport passes unchanged.
//!
//! A transport's test file implements [`Carrier`] and makes tests of all checks with [`conformance_tests!`].
//! A check panics when the transport breaks its promise. What is promised is written in `docs/src/fabric.md`.

// The checks' names say what they claim.
#[allow(missing_docs)]
mod atomics;
#[allow(missing_docs)]
mod batches;
#[allow(missing_docs)]
mod connections;
#[allow(missing_docs)]
mod fences;
#[allow(missing_docs)]
mod ordering;
#[allow(missing_docs)]
mod processes;
#[allow(missing_docs)]
mod refusals;
mod rig;
#[allow(missing_docs)]
mod sharing;
#[allow(missing_docs)]
mod transfers;

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use crate::{Clock, MonotonicClock, Peer, Transport};

pub use atomics::*;
pub use batches::*;
pub use connections::*;
pub use fences::*;
pub use ordering::*;
pub use processes::*;
pub use refusals::*;
pub use rig::SuiteHost;
pub use sharing::*;
pub use transfers::*;

/// The suite's access to a transport.
pub trait Carrier: Sync {
    /// Serves `host` until the guard is dropped, which stands for the death of the node. With `at`, serves at
    /// the addresses of an earlier node that is dead by now.
    fn serve(&self, host: Arc<SuiteHost>, at: Option<&Peer>) -> (Peer, Box<dyn Any>);

    /// Opens links to peers that [`Carrier::serve`] returned.
    fn transport(&self) -> Rc<dyn Transport>;

    /// Whether another process can open links to the peers. In the simulator it cannot: some checks then use
    /// only this process, or have nothing to check.
    fn reaches_other_processes(&self) -> bool {
        true
    }

    /// Whether [`Queue::read_now`](crate::Queue::read_now) reads what is attached.
    fn reads_now(&self) -> bool {
        false
    }

    /// `true`: holds back what clients send on the connections that are open now. `false`: delivers it. On a
    /// network that cannot do that, this does nothing, and only a node that does not serve requests delays
    /// them.
    fn hold_back(&self, _held: bool) {}

    /// How many queues the suite opens and closes when it checks for leaks. Fewer where opening one takes
    /// long.
    fn queues_to_open(&self) -> usize {
        10_000
    }

    /// The clock of the endpoints.
    fn clock(&self) -> Rc<dyn Clock> {
        Rc::new(MonotonicClock)
    }
}

/// Makes a `#[test]` of each check of the suite, for the carrier that an expression gives, so that a
/// transport cannot leave one out.
#[macro_export]
macro_rules! conformance_tests {
    ($carrier:expr $(,)?) => {
        $crate::conformance_tests! {
            $carrier;
            bytes_written_are_read_back,
            a_completed_write_is_seen_by_every_queue,
            the_largest_transfer_works_and_a_larger_one_is_refused,
            a_read_without_waiting_reads_as_others_do_or_says_that_it_cannot,
            out_of_bounds_is_refused_and_changes_nothing,
            misaligned_atomics_are_refused,
            a_region_that_was_not_attached_is_refused,
            a_wrong_key_is_refused,
            an_old_epoch_is_refused,
            a_detached_region_is_refused,
            compare_and_swap_swaps_only_on_equality,
            fetch_and_add_loses_no_addition_under_contention,
            more_operations_than_places_all_complete,
            a_dropped_operation_does_not_free_its_buffer_early,
            a_batch_does_what_its_operations_do_one_by_one,
            a_refusal_within_a_batch_spoils_no_neighbour,
            operations_that_are_too_long_are_refused_wherever_they_stand,
            what_is_behind_an_operation_refused_as_busy_waits_for_an_attachment,
            batches_wait_for_places_and_all_come_through,
            a_dropped_batch_does_not_free_its_buffer_early,
            a_batch_on_a_closed_queue_is_not_sent,
            more_answers_than_a_connection_may_hold_back_all_come,
            calls_are_answered_and_unknown_calls_refused,
            calls_are_answered_at_every_pace,
            an_answer_longer_than_its_room_is_refused_and_the_queue_goes_on,
            more_calls_than_the_node_takes_at_once_each_get_their_own_answer,
            calls_and_attachments_by_turns_all_end,
            calls_are_refused_while_nothing_is_attached,
            a_reader_of_a_later_write_sees_the_earlier_ones,
            what_is_fenced_takes_effect_after_the_reads_and_atomics_before_it,
            without_a_fence_a_read_gives_each_word_as_it_was_or_as_it_became,
            what_was_acknowledged_before_a_fence_stays_and_nothing_follows_it,
            a_lent_again_region_shows_nothing_of_its_last_holder,
            each_grant_is_opened_by_its_own_key_only,
            a_read_only_grant_reads_but_neither_writes_nor_swaps,
            fencing_one_of_three_sharers_ends_its_access_and_costs_the_others_nothing,
            what_a_client_stopped_in_a_copy_goes_on_to_write_after_its_fence_is_never_seen,
            additions_of_several_processes_are_all_counted,
            an_older_incarnation_is_dead_once_a_newer_one_is_answered,
            the_death_of_the_node_ends_every_operation,
            what_was_acknowledged_before_the_node_died_is_in_its_memory,
            a_silent_node_ends_operations_by_their_deadline,
            a_killed_node_process_wakes_the_clients_that_wait_for_it,
            a_node_process_that_is_stopped_is_waited_for_until_the_deadline,
            what_was_delayed_past_unknown_takes_no_effect_after_a_new_incarnation,
            a_restarted_node_is_reached_again_and_knows_no_older_grant,
            thousands_of_queues_come_and_go,
        }

        #[test]
        fn takes_part_as_a_process_of_a_check() {
            $crate::conformance::run_as_child(&$carrier);
        }
    };
    ($carrier:expr; $($check:ident),* $(,)?) => {
        $(#[test]
        fn $check() {
            $crate::conformance::$check(&$carrier);
        })*
    };
}
