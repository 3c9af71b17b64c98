use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Response, Status};

use crate::fault::{Fault, fault_of};

/// The most times that a request is sent.
const MOST_TRIES: u32 = 8;
/// Pause before the second attempt; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Sends a request until it is answered, for at most `within`. It tries again if the request was lost with
/// its connection or the other side was overloaded, so use it only for requests that may arrive twice.
/// [`explain`](crate::explain) turns the error into text.
pub async fn ask<T, F>(within: Duration, mut request: impl FnMut() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let deadline = Instant::now() + within;
    let mut pause = FIRST_PAUSE;
    let late = || Status::deadline_exceeded(format!("no answer within {} s", within.as_secs_f32()));
    for tries in 1.. {
        let answer = timeout_at(deadline, request()).await.map_err(|_| late())?;
        match answer {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if tries == MOST_TRIES || !may_succeed_later(&status) => return Err(status),
            Err(status) if Instant::now() + pause >= deadline => return Err(status),
            Err(_) => {}
        }
        sleep(pause).await;
        pause = LONGEST_PAUSE.min(2 * pause);
    }
    Err(late())
}

/// Whether the same request may succeed a moment later.
fn may_succeed_later(status: &Status) -> bool {
    match fault_of(status) {
        Some(fault) => *fault == Fault::Closed,
        None => std::error::Error::source(status).is_some() || status.code() == Code::ResourceExhausted,
    }
}
