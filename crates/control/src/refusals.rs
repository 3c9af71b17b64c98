//! Decides which refusals of peers are logged. Each reason has a throttle of its own, so that a flood of one
//! kind does not hide another. Not here: the clock, and the text of the log lines.

use std::mem::{Discriminant, discriminant};
use std::time::Instant;

use farpool_throttle::Throttles;

use crate::fault::{CertificateFault, Fault};

/// The reason without the parts that differ from peer to peer.
type Kind = (Discriminant<Fault>, Option<Discriminant<CertificateFault>>);

/// Refusals of one listener.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Throttles<Kind>);

impl Refusals {
    /// A peer is refused. If a line is to be logged, returns how many refusals of the same kind were left out
    /// since the last line.
    pub(crate) fn occurs(&self, fault: &Fault, now: Instant) -> Option<u64> {
        let certificate = match fault {
            Fault::ItsCertificate(wrong) | Fault::OurCertificate(wrong) => Some(discriminant(wrong)),
            _ => None,
        };
        self.0.occurs((discriminant(fault), certificate), now)
    }

    /// How many refusals were left out, summed over all kinds whose last line is at least a period old.
    pub(crate) fn overdue(&self, now: Instant) -> u64 {
        self.0.overdue(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_throttle::PERIOD;

    #[test]
    fn a_flood_of_one_kind_is_one_line_and_hides_no_other_kind() {
        let (start, refusals) = (Instant::now(), Refusals::default());
        let unusable =
            |number: u32| Fault::ItsCertificate(CertificateFault::Unusable(format!("alert {number}")));
        let lines = (0..1_000).filter_map(|number| refusals.occurs(&unusable(number), start));
        assert_eq!(lines.collect::<Vec<_>>(), [0]);
        assert_eq!(refusals.occurs(&Fault::ItsCertificate(CertificateFault::Expired), start), Some(0));
        assert_eq!(refusals.occurs(&Fault::OurCertificate(CertificateFault::Expired), start), Some(0));
        assert_eq!(refusals.occurs(&Fault::SpokePlainText, start), Some(0));
        assert_eq!(refusals.overdue(start), 0);
        assert_eq!(refusals.overdue(start + PERIOD), 999);
    }
}
