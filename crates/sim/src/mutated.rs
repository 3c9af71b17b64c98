//! The mutation of the run on this thread. It is thread-local because a run stays on one thread, and so that
//! all mutations of a scenario share one type of rules: the code under test is compiled once.

use std::cell::Cell;

thread_local! {
    static MUTATION: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Sets the mutation for the runs of this thread from now on.
pub(crate) fn set(mutation: Option<&'static str>) {
    MUTATION.set(mutation);
}

/// The mutation of this thread's runs.
pub(crate) fn get() -> Option<&'static str> {
    MUTATION.get()
}

/// Whether this is the mutation of this thread's runs.
pub(crate) fn is(mutation: &str) -> bool {
    get() == Some(mutation)
}
