//! Clients that another client of the same owner has let in. Each is told for how long it may use the region,
//! counts that time from its question (H5), and asks again before the time has passed.

use std::rc::Rc;
use std::time::Duration;

use farpool_lease::Millis;
use farpool_wire::{Epoch, RegionId};

use super::Client;
use crate::plane::oracle::LeaseNo;
use crate::plane::post::{Answer, Invitation, Question};

/// How long a client waits to hear for how long it may use a region.
const PATIENCE: Duration = Duration::from_secs(1);
/// A client asks again when less than this part of a lease's time is left to it.
const ASK_AGAIN_DIVISOR: u64 = 3;

/// A grant that another client has passed on.
pub(super) struct Invited {
    pub(super) invitation: Invitation,
    /// By the client's own clock. A client that does not ask uses the region until it is refused.
    usable_until: Millis,
}

impl Invited {
    fn is(&self, region: RegionId, grant: Epoch) -> bool {
        self.invitation.region == region && self.invitation.grant == grant
    }
}

impl Client {
    /// Takes a grant that another client passes on.
    pub(super) fn accept(&self, invitation: Invitation) {
        let mut invited = self.invited.borrow_mut();
        if !invited.iter().any(|known| known.is(invitation.region, invitation.grant)) {
            invited.push(Invited { invitation, usable_until: Millis(0) });
        }
    }

    /// Answers a client that was let in.
    pub(super) fn how_long(&self, region: RegionId, grant: Epoch) -> Answer {
        let held = self.held.borrow();
        let gave = |held: &&super::Held| held.guests.iter().any(|(_, known)| *known == grant);
        let Some(held) = held.get(&region).filter(gave) else { return Answer::Refused };
        let holder = self.holder.borrow();
        match holder.usable_for(self.now(), region) {
            Some(time) if self.trusts(region, held.epoch) => Answer::UsableFor(time),
            _ => Answer::Refused,
        }
    }

    /// Asks for how long the regions may be used, again and again.
    pub(super) async fn ask_how_long(self: Rc<Self>) {
        while self.seat.asks && !self.is_leaving() {
            self.sleep_ms(50, 300).await;
            let soon = self.now().plus(Millis(self.run.ttl.0 / ASK_AGAIN_DIVISOR));
            let due: Vec<Invitation> = {
                let invited = self.invited.borrow();
                let due = invited.iter().filter(|known| known.usable_until < soon);
                due.map(|known| known.invitation).collect()
            };
            for Invitation { owner, region, grant, .. } in due {
                let asked_at = self.now();
                let question = Question::HowLong { region, grant };
                match self.post().ask(owner, question, PATIENCE).await {
                    Some(Answer::UsableFor(time)) => {
                        let mut invited = self.invited.borrow_mut();
                        if let Some(known) = invited.iter_mut().find(|known| known.is(region, grant)) {
                            known.usable_until = known.usable_until.max(asked_at.plus(time));
                        }
                    }
                    Some(_) => self.forget_grant(region, grant),
                    None => {}
                }
            }
        }
    }

    /// Whether the client may use a region under a grant that it was given, as far as it knows.
    pub(super) fn is_told(&self, region: RegionId, grant: Epoch) -> bool {
        let (now, invited) = (self.now(), self.invited.borrow());
        let may = |known: &Invited| !self.seat.asks || now < known.usable_until;
        invited.iter().any(|known| known.is(region, grant) && may(known))
    }

    /// Whether the client has been told that it may use a region under this lease now.
    pub(in crate::pool) fn is_told_to_use(&self, lease: LeaseNo) -> bool {
        let (now, invited) = (self.now(), self.invited.borrow());
        invited.iter().any(|known| known.invitation.lease == lease && now < known.usable_until)
    }

    /// Forgets a grant under which the client was refused.
    pub(super) fn forget_grant(&self, region: RegionId, grant: Epoch) {
        self.invited.borrow_mut().retain(|known| !known.is(region, grant));
    }
}
