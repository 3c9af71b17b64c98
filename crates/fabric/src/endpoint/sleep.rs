//! Sleeping by the endpoint's clock.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Endpoint;

/// Ends once the clock has reached `until_ns`. It has at most one entry among the sleepers, however often it
/// is polled, and none once it is dropped.
pub(super) struct Sleep<'a> {
    endpoint: &'a Endpoint,
    until_ns: u64,
    ticket: Option<u64>,
}

impl<'a> Sleep<'a> {
    pub(super) fn new(endpoint: &'a Endpoint, until_ns: u64) -> Self {
        Sleep { endpoint, until_ns, ticket: None }
    }
}

impl Future for Sleep<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.endpoint.now_ns() >= this.until_ns {
            return Poll::Ready(());
        }
        let mut table = this.endpoint.shared.table.borrow_mut();
        table.sleep_until(this.until_ns, &mut this.ticket, context.waker());
        Poll::Pending
    }
}

impl Drop for Sleep<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.endpoint.shared.table.borrow_mut().stop_sleeping(ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::rc::Rc;
    use std::task::Waker;
    use std::time::Duration;

    use farpool_wire::SessionId;

    use super::*;
    use crate::{Clock, EndpointConfig, TcpTransport};

    #[derive(Clone, Default)]
    struct Hand(Rc<Cell<u64>>);

    impl Clock for Hand {
        fn now_ns(&self) -> u64 {
            self.0.get()
        }
    }

    #[test]
    fn a_sleeper_is_listed_once_however_often_it_is_polled_and_not_after_it_is_dropped() {
        let clock = Hand::default();
        let endpoint = Endpoint::new(EndpointConfig {
            transport: Rc::new(TcpTransport),
            clock: Rc::new(clock.clone()),
            session_ids: Box::new(|| SessionId(1)),
            arena_bytes: 1,
            deadline: Duration::MAX,
        });
        let sleepers = || endpoint.shared.table.borrow().sleepers();
        let mut context = Context::from_waker(Waker::noop());
        {
            let mut sleep = pin!(endpoint.sleep(Duration::from_nanos(10)));
            for _ in 0..100 {
                assert!(sleep.as_mut().poll(&mut context).is_pending());
            }
            assert_eq!((sleepers(), endpoint.next_deadline_ns()), (1, Some(10)));
            let mut given_up = Box::pin(endpoint.sleep(Duration::MAX));
            assert!(given_up.as_mut().poll(&mut context).is_pending());
            assert_eq!(sleepers(), 2);
            drop(given_up);
            clock.0.set(10);
            endpoint.poll();
            assert!(sleep.as_mut().poll(&mut context).is_ready());
        }
        assert_eq!((sleepers(), endpoint.next_deadline_ns()), (0, None));
    }
}
