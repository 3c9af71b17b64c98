//! What code logs, for tests.

use std::fmt::{Debug, Write};
use std::sync::Arc;

use rustix_futex_sync::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Runs code, and returns the messages that it logs on this thread, each with its fields.
pub(crate) fn logged(code: impl FnOnce()) -> Vec<String> {
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), code);
    std::mem::take(&mut *log.0.lock())
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

/// A message as text: `name=value` for each of its fields.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").expect("a string takes any text");
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
