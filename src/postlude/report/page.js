// Shows what a mark stands for when it is pointed at, touched or focused.
const box = document.getElementById("tip");
function show(event) {
  const mark = event.target.closest("[data-tip]");
  if (!mark || !mark.dataset.tip) { box.hidden = true; return; }
  box.textContent = mark.dataset.tip;
  box.hidden = false;
  const place = mark.getBoundingClientRect();
  const left = Math.min(Math.max(8, place.left + place.width / 2 - box.offsetWidth / 2), innerWidth - box.offsetWidth - 8);
  const above = place.top - box.offsetHeight - 8;
  box.style.left = `${left}px`;
  box.style.top = `${above > 4 ? above : place.bottom + 8}px`;
}
for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, show);
document.addEventListener("scroll", () => { box.hidden = true; }, { passive: true });
// A link to a Region opens it.
function open() {
  const named = location.hash && document.getElementById(location.hash.slice(1));
  if (named && named.tagName === "DETAILS") named.open = true;
}
addEventListener("hashchange", open);
open();
