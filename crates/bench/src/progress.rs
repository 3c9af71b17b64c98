//! Shows on standard error what a long measurement is doing: a spinner or bar on a terminal, plain lines
//! elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines about the same step without a terminal: a log should show progress, but not too
/// much.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Time between two frames of the spinner.
const TURN: Duration = Duration::from_millis(100);

/// Makes [`Step`]s, all in one style.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    moving: bool,
}

impl Progress {
    /// Spinners and bars if standard error is a terminal, otherwise lines.
    pub fn on_stderr() -> Self {
        Self { moving: std::io::stderr().is_terminal() }
    }

    /// Starts a step, which is shown until it is dropped.
    pub fn step(&self, text: impl Into<String>) -> Step {
        let text = text.into();
        let bar = if self.moving {
            let bar = ProgressBar::new_spinner().with_message(text.clone());
            bar.set_style(style("{spinner} {msg} {elapsed}"));
            bar.enable_steady_tick(TURN);
            Some(bar)
        } else {
            complain(&format!("{text} ..."));
            None
        };
        Step { text, bar, last_line: Mutex::new(Instant::now()) }
    }

    /// Prints a remark that stays on the screen.
    pub fn note(&self, text: &str) {
        complain(text);
    }
}

/// Prints a line on standard error. A closed or full stream does not end the measurement; its guards print on
/// drop as well.
pub(crate) fn complain(line: &str) {
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Prints what went wrong without ending the measurement.
pub(crate) fn warn(text: &str) {
    complain(&format!("farpool: {text}"));
}

/// A step in progress.
#[derive(Debug)]
pub struct Step {
    text: String,
    bar: Option<ProgressBar>,
    last_line: Mutex<Instant>,
}

impl Step {
    /// Shows that `done` of `total` units (rows, for instance) are done.
    pub fn advance(&self, done: u64, total: u64) {
        let done = done.min(total);
        match &self.bar {
            Some(bar) => {
                if bar.length() != Some(total) {
                    bar.set_style(style("{spinner} {msg} [{wide_bar}] {percent} % {elapsed}"));
                    bar.set_length(total);
                }
                bar.set_position(done);
            }
            None => self.line(|| format!("{} %", done * 100 / total.max(1))),
        }
    }

    /// Shows that the step still runs, for waits of unknown length.
    pub fn alive(&self, since: Instant) {
        if self.bar.is_none() {
            self.line(|| format!("{:.0} s", since.elapsed().as_secs_f64()));
        }
    }

    /// Ends the step, and prints its outcome.
    pub fn done(self, outcome: &str) {
        clear(self.bar.as_ref());
        complain(&format!("{}: {outcome}", self.text));
    }

    fn line(&self, state: impl FnOnce() -> String) {
        let Ok(mut last) = self.last_line.lock() else { return }; // skips the line if another thread panicked
        if last.elapsed() >= LINE_EVERY {
            *last = Instant::now();
            complain(&format!("{} ... {}", self.text, state()));
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        clear(self.bar.as_ref());
    }
}

/// One bar for a known number of tasks.
pub struct Tasks {
    bar: Option<ProgressBar>,
}

impl Tasks {
    /// Starts with this many tasks to do.
    pub fn start(tasks: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(tasks as u64);
            bar.with_style(style("[{wide_bar}] {percent} % {eta} {msg}"))
        });
        Tasks { bar }
    }

    /// Says what is being done now.
    pub fn step(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => complain(text),
        }
    }

    /// Marks a task as done.
    pub fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        clear(self.bar.as_ref());
    }
}

fn clear(bar: Option<&ProgressBar>) {
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}
