//! Service threads of a compute server, which run until its member has ended.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::database::Process;
use crate::error::{DatabaseError, Ended};
use crate::member::MemberCore;

/// Starts a thread named `db-` and `name`.
pub(crate) fn start(
    core: &Arc<MemberCore<Process>>,
    name: &'static str,
    run: impl FnOnce(&MemberCore<Process>) + Send + 'static,
) -> Result<JoinHandle<()>, DatabaseError> {
    let core = core.clone();
    let serve = move || end_on_panic(name, || run(&core), |why| core.end(why));
    std::thread::Builder::new().name(format!("db-{name}")).spawn(serve).map_err(DatabaseError::Thread)
}

/// Returns what `run` returns. If it panics, the member ends first: others take over the thread's roles only
/// once this member is evicted.
fn end_on_panic<T>(name: &str, run: impl FnOnce() -> T, ends: impl FnOnce(Ended)) -> T {
    // Unwind safety: nothing that `run` has used is used afterwards, since the whole member has ended.
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        ends(Ended::Failed(format!(
            "the {name} of this compute server has panicked: open the database again"
        )));
        resume_unwind(panic)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use farpool_txn::membership::Duties;

    use super::*;

    #[test]
    fn a_thread_that_panics_ends_its_member_and_leaves_its_duty_in_doubt() {
        let (duties, ended) = (Duties::default(), Cell::new(None));
        let duty = duties.begin("publisher");
        let run = || {
            let _duty = duty;
            panic!("on purpose");
        };
        let thread =
            || end_on_panic::<()>("publisher", run, |why| ended.set(Some((why, duties.are_in_doubt()))));
        assert!(catch_unwind(AssertUnwindSafe(thread)).is_err(), "the panic goes on, so `join` returns it");
        let (why, is_in_doubt) = ended.take().unwrap();
        assert!(why.to_string().contains("publisher") && is_in_doubt, "{why}");
        assert_eq!(end_on_panic("publisher", || 7, |_| panic!("nothing has happened")), 7);
    }
}
