//! The conformance suite over the simulated fabric: packets that a node checks, served whole or torn word by word, and
//! memory that clients copy to and from themselves.
//!
//! The suite brings threads and blocks, so the world is driven by whoever polls; scenarios in which one seed gives one
//! history are in the crate `farpool-sim`.

use std::any::Any;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use farpool_fabric::conformance::{Carrier, SuiteHost};
use farpool_fabric::sim::{HostId, Path, Service, World, WorldConfig};
use farpool_fabric::{Clock, Host, Peer, Transport, conformance_tests};

/// One world per check, since all nodes of the suite have the same name.
struct Simulated {
    path: Path,
    service: Service,
    place: LazyLock<(World, HostId)>,
}

impl Simulated {
    const fn new(path: Path, service: Service) -> Self {
        let place: LazyLock<(World, HostId)> = LazyLock::new(world);
        Simulated { path, service, place }
    }
}

fn world() -> (World, HostId) {
    let world = World::new(WorldConfig { self_driven: true, ..WorldConfig::new(1) });
    let host = world.add_host(1_000_000);
    (world, host)
}

/// Ends the node when dropped.
struct Crash(World, Peer);

impl Drop for Crash {
    fn drop(&mut self) {
        self.0.crash_node(self.1.node);
    }
}

impl Carrier for Simulated {
    fn serve(&self, host: Arc<SuiteHost>, _at: Option<&Peer>) -> (Peer, Box<dyn Any>) {
        let (world, place) = &*self.place;
        let observed = host.clone();
        let ready = Box::new(move || !observed.is_stalled());
        let peer = world.serve_when(*place, host as Arc<dyn Host>, self.service, Some(ready));
        (peer.clone(), Box::new(Crash(world.clone(), peer)))
    }

    fn transport(&self) -> Rc<dyn Transport> {
        let (world, node_host) = &*self.place;
        let host = if self.path == Path::Shared { *node_host } else { world.add_host(1_000_000) };
        world.transport(world.add_process(host), self.path)
    }

    fn reaches_other_processes(&self) -> bool {
        false
    }

    fn clock(&self) -> Rc<dyn Clock> {
        let (world, host) = &*self.place;
        Rc::new(world.clock(*host))
    }
}

macro_rules! suites {
    ($($suite:ident: $path:expr, $service:expr;)*) => {
        $(mod $suite {
            use super::*;

            conformance_tests! {
                Simulated::new($path, $service);
                bytes_written_are_read_back,
                a_completed_write_is_seen_by_every_queue,
                the_largest_transfer_works_and_a_larger_one_is_refused,
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
                batches_wait_for_places_and_all_come_through,
                a_dropped_batch_does_not_free_its_buffer_early,
                a_batch_on_a_closed_queue_is_not_sent,
                more_answers_than_a_connection_may_hold_back_all_come,
                calls_are_answered_and_unknown_calls_refused,
                an_answer_longer_than_its_room_is_refused_and_the_queue_goes_on,
                more_calls_than_the_node_takes_at_once_each_get_their_own_answer,
                calls_and_attachments_by_turns_all_end,
                whoever_sees_a_later_write_sees_the_earlier_ones,
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
                a_node_process_that_is_killed_wakes_who_waits_for_it,
                a_node_process_that_is_stopped_is_waited_for_until_the_deadline,
                what_was_delayed_past_unknown_takes_no_effect_after_a_new_incarnation,
                a_restarted_node_is_reached_again_and_knows_no_older_grant,
                thousands_of_queues_come_and_go,
            }
        })*
    };
}

suites! {
    checked_whole: Path::Checked, Service::Whole;
    checked_torn: Path::Checked, Service::Torn;
    shared: Path::Shared, Service::Whole;
}
