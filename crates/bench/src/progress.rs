//! Shows the progress of a long measurement.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::child::complain;

/// A progress bar on a terminal, plain lines elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts with this many steps to do.
    pub fn start(steps: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(steps as u64));
        if let Some(bar) = &bar {
            let style = ProgressStyle::with_template("[{wide_bar}] {percent} % {eta} {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        }
        Progress { bar }
    }

    /// Says what is being done now.
    pub fn step(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => complain(text),
        }
    }

    /// Marks a step as done.
    pub fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
