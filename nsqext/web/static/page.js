// Keeps the changing part of a page current: the server sends it rendered, and only what differs is replaced, so that
// focus and selection stay. Without JavaScript the page is read as it is.
"use strict";
(() => {
  const live = document.getElementById("live");
  const state = document.getElementById("state");
  const hold = document.getElementById("hold");
  if (!live || !state || !hold || !window.EventSource) return;

  const show = (text, kind) => {
    if (state.textContent !== text) state.textContent = text;
    state.className = "pulse " + kind;
  };
  let old = null; // age of the numbers in seconds, and when it was received; null while the cluster is read
  const showAge = () => {
    const taken = live.querySelector("[data-stale]");
    if (!taken) {
      old = null;
      return false;
    }
    const age = Number(taken.dataset.stale);
    if (!old || old.age !== age) old = { age, at: Date.now() };
    show(`stale, ${Math.round(age + (Date.now() - old.at) / 1000)} s`, "lost");
    return true;
  };
  // a form with a key never becomes the form of another action below a click
  const key = (node) => (node.getAttribute ? node.getAttribute("data-key") || node.id : "");
  const alike = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && key(one) === key(other);

  function update(from, to) {
    if (from.nodeType !== Node.ELEMENT_NODE) {
      if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
      return;
    }
    for (const { name } of [...from.attributes]) if (!to.hasAttribute(name)) from.removeAttribute(name);
    for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    updateChildren(from, to);
  }

  function updateChildren(from, to) {
    let place = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      let found = place;
      while (found && !alike(found, wanted)) found = found.nextSibling;
      if (!found) {
        from.insertBefore(wanted, place);
        continue;
      }
      while (place !== found) {
        const gone = place;
        place = place.nextSibling;
        gone.remove();
      }
      update(found, wanted);
      place = found.nextSibling;
    }
    while (place) {
      const gone = place;
      place = place.nextSibling;
      gone.remove();
    }
  }

  let events = null;
  function open() {
    events = new EventSource(location.pathname + location.search);
    events.onopen = () => showAge() || show("live", "");
    events.onerror = () => {
      show("no connection", "lost");
      // a browser does not repeat a request that was answered with an error, such as 502 of a proxy
      if (events.readyState === EventSource.CLOSED) setTimeout(reopen, 2000);
    };
    events.onmessage = (event) => {
      const fresh = document.createElement("template");
      fresh.innerHTML = JSON.parse(event.data);
      updateChildren(live, fresh.content);
      if (!showAge()) show("live", state.classList.contains("beat") ? "" : "beat");
    };
    events.addEventListener("gone", (event) => show(JSON.parse(event.data), "lost"));
  }
  const reopen = () => events && events.readyState === EventSource.CLOSED && open();
  hold.onclick = () => {
    if (events) {
      events.close();
      events = null;
      show("held", "held");
    } else {
      open();
    }
    hold.textContent = events ? "Hold" : "Resume";
  };
  window.addEventListener("pagehide", () => events && events.close());
  window.addEventListener("pageshow", (event) => event.persisted && events && open());
  state.hidden = hold.hidden = false;
  document.getElementById("read")?.remove();
  if (!showAge()) show("live", "");
  setInterval(() => events && events.readyState === EventSource.OPEN && old && showAge(), 1000);
  open();
})();
